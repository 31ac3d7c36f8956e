"""PRIME (2502.01456): process rewards from a language model that is trained on outcomes alone.

The log-ratio of a token is log π_reward − log π_reference; β times its sum is the logit of a correct answer.
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
    """[B, T] β · log-ratio per token, 0 on the last token, which has the outcome reward.

    `whole` puts the sum of all tokens on the last one. `batch_norm` divides by the largest absolute return.
    """
    mask = response_mask.bool()
    rewards = zero_outside_mask(log_ratio * beta, mask)
    position = torch.arange(mask.shape[-1], device=mask.device)
    last = position == torch.where(mask, position, -1).amax(-1, keepdim=True)
    if granularity == "whole":
        rewards = rewards.sum(-1, keepdim=True) * last
    else:
        rewards = zero_outside_mask(rewards, ~last)
    if norm == "batch_norm":
        returns = rewards.flip(-1).cumsum(-1)
        rewards = rewards / (returns.abs().max() + _EPS)
    return rewards


def outcome_losses(
    log_ratio: Tensor, outcome: Tensor, response_mask: Tensor, beta: float, rivals: Tensor | None
) -> Tensor:
    """[B] loss of each response: cross-entropy of σ(β · Σ log-ratio) with its outcome in 0 … 1.

    With `rivals` (`rival_logits`), −log σ(± (logit − rival logit)): plus for a correct response, else minus.
    """
    logit = beta * masked_sum(log_ratio, response_mask, -1)
    if rivals is None:
        return binary_cross_entropy_with_logits(logit, outcome.to(logit.dtype), reduction="none")
    return -logsigmoid((logit - rivals) * torch.where(outcome > 0, 1.0, -1.0))


def rival_logits(logit: Tensor, outcome: Tensor, index: Labels) -> Tensor:
    """[B] mean logit of the group's responses with a lower outcome, or with a higher one if the outcome is 0;
    0 without such responses."""
    ids = Groups.of(index).ids.to(logit.device)
    lower = outcome[None] < outcome[:, None]
    rival = torch.where((outcome > 0)[:, None], lower, outcome[None] > outcome[:, None])
    rival = rival & (ids[None] == ids[:, None])
    return (rival * logit[None]).sum(-1) / rival.sum(-1).clamp(min=1)


def ranking_accuracy(logit: Tensor, outcome: Tensor, index: Labels) -> tuple[float, float]:
    """Returns the fraction of pairs of one group that the logits order as the outcomes do, weighted by the
    difference of outcomes (0.5 without pairs), and the fraction of logits with the right sign."""
    ids = Groups.of(index).ids
    better = (outcome[:, None] - outcome[None]).clamp(min=0) * (ids[:, None] == ids[None])
    total = float(better.sum())
    ordered = float((better * (logit[:, None] > logit[None])).sum())
    signs = float(((logit > 0) == (outcome > 0.5)).double().mean())
    return (ordered / total if total > 0 else 0.5), signs
