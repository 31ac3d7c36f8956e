"""PRIME (2502.01456): process rewards from a language model that is trained on outcomes alone.

The log-ratio of a token is log π_reward − log π_reference; β times the sum over a response is the logit of
the probability that its answer is correct.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from hone.ops.groups import Groups, Labels
from hone.ops.masked import masked_sum, zero_outside_mask

_EPS = 1e-6


def implicit_rewards(
    log_ratio: Tensor, response_mask: Tensor, *, beta: float, granularity: str, norm: str
) -> Tensor:
    """Returns [B, T] β · log-ratio per token, and 0 on the last token, which has the outcome reward.

    The granularity `whole` puts the sum over all tokens on the last token instead. The norm `batch_norm`
    divides by the largest absolute return.
    """
    mask = response_mask.bool()
    rewards = zero_outside_mask(log_ratio * beta, mask)
    position = torch.arange(mask.shape[-1], device=mask.device)
    is_last = position == torch.where(mask, position, -1).amax(-1, keepdim=True)
    if granularity == "whole":
        rewards = rewards.sum(-1, keepdim=True) * is_last
    else:
        rewards = zero_outside_mask(rewards, ~is_last)
    if norm == "batch_norm":
        returns = rewards.flip(-1).cumsum(-1)
        rewards = rewards / (returns.abs().max() + _EPS)
    return rewards


def outcome_losses(
    log_ratio: Tensor, outcome: Tensor, response_mask: Tensor, beta: float, rivals: Tensor | None
) -> Tensor:
    """Returns the loss [B] of each response: the cross-entropy of σ(β · Σ log-ratio) with its outcome.

    With `rivals`, the result of `rival_logits`, the loss is −log σ(± (logit − rival logit)): plus for a
    correct response, minus for others.
    """
    logit = beta * masked_sum(log_ratio, response_mask, -1)
    if rivals is None:
        return binary_cross_entropy_with_logits(logit, outcome.to(logit.dtype), reduction="none")
    return -logsigmoid((logit - rivals) * torch.where(outcome > 0, 1.0, -1.0))


def rival_logits(logit: Tensor, outcome: Tensor, index: Labels) -> Tensor:
    """Returns [B] the mean logit of each response's rivals, or 0 without rivals.

    Rivals are the responses of the same group with a lower outcome, or with a higher outcome if the
    response's own outcome is 0.
    """
    ids = Groups.of(index).ids.to(logit.device)
    is_lower = outcome[None] < outcome[:, None]
    is_rival = torch.where((outcome > 0)[:, None], is_lower, outcome[None] > outcome[:, None])
    is_rival = is_rival & (ids[None] == ids[:, None])
    return (is_rival * logit[None]).sum(-1) / is_rival.sum(-1).clamp(min=1)


def ranking_accuracy(logit: Tensor, outcome: Tensor, index: Labels) -> tuple[float, float]:
    """Returns two accuracies: that of pairs in a group, and that of the logits' signs.

    The first is the fraction of pairs that the logits order as the outcomes do, weighted by the difference
    of outcomes (0.5 without pairs).
    """
    ids = Groups.of(index).ids
    weights = (outcome[:, None] - outcome[None]).clamp(min=0) * (ids[:, None] == ids[None])
    total_weight = float(weights.sum())
    ordered_weight = float((weights * (logit[:, None] > logit[None])).sum())
    sign_accuracy = float(((logit > 0) == (outcome > 0.5)).double().mean())
    return (ordered_weight / total_weight if total_weight > 0 else 0.5), sign_accuracy
