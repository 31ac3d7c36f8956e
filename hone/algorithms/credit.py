"""Process rewards: scores of reasoning steps (PURE, 2504.15275) and implicit rewards (PRIME, 2502.01456).

PURE: a step's score is on its last token. Credit is assigned by a soft minimum, by the strict minimum over
the remaining steps, or by a plain sum.

PRIME: the log-ratio of a token is log π_reward − log π_reference; β times the sum over a response is the
logit of the probability that its answer is correct.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid, pad

from hone.algorithms.advantages.returns import RowOrder, rewards_to_go
from hone.ops.rows import Groups, Labels, masked_sum, zero_outside_mask

GAMMA_DECAY = "gamma-decay"
STRICT_MIN = "strict min-form"
_EPS = 1e-6


def step_ends(responses: Tensor, response_mask: Tensor, separator_ids: Tensor) -> Tensor:
    """Returns a mask [B, T] of the tokens that end a step, and of the last policy token."""
    mask = response_mask.bool()
    position = torch.arange(mask.shape[-1], device=mask.device)
    last_position = pad(torch.where(mask, position, -1), (0, 1), value=-1).amax(-1, keepdim=True)
    return mask & (torch.isin(responses, separator_ids) | (position == last_position))


def step_rewards(log_odds: Tensor) -> Tensor:
    """Returns p(good) − p(bad), in −1 … 1, from the log-odds (difference of the logits) of a good step."""
    return torch.tanh(log_odds / 2)


def assign_credit(
    process_rewards: Tensor,
    step_mask: Tensor,
    credit_assignment: float | str,
    trajectory: Tensor | None = None,
) -> Tensor:
    """Returns the step rewards [B, T] from which returns are computed; 0 where no step ends.

    If `credit_assignment` is a temperature τ > 0, each step's reward r is weighted by softmax(−r/τ) over the
    steps of its trajectory, so that the sum tends to the minimum as τ → 0. The named forms do not change the
    rewards. `trajectory` [B] has the index of each row's trajectory; None: each row is a trajectory.
    """
    mask = step_mask.bool()
    rewards = zero_outside_mask(process_rewards, mask)
    if credit_assignment in (GAMMA_DECAY, STRICT_MIN):
        return rewards
    try:
        temperature = float(credit_assignment)
    except ValueError:
        temperature = math.nan
    if not temperature > 0:
        raise ValueError(
            f"reward_model.credit_assignment must be a temperature above 0, {GAMMA_DECAY!r} or "
            f"{STRICT_MIN!r}; got {credit_assignment!r}"
        )
    logits = torch.where(mask, -rewards / temperature, -torch.inf)
    if trajectory is None:
        weights = torch.softmax(logits, dim=-1)
    else:
        # The log-sum-exp of a trajectory, from the log-sum-exp of each of its rows.
        row_lse = torch.logsumexp(logits, dim=-1)
        minus_inf = torch.full_like(row_lse, -torch.inf)
        maxima = minus_inf.scatter_reduce(0, trajectory, row_lse, "amax")[trajectory]
        row_sums = (row_lse - maxima).exp()
        sums = torch.zeros_like(row_lse).index_add(0, trajectory, row_sums)[trajectory]
        weights = (logits - (maxima + sums.log()).unsqueeze(-1)).exp()
    return zero_outside_mask(weights * rewards, mask)


def min_form_returns(
    process_rewards: Tensor,
    step_mask: Tensor,
    response_mask: Tensor,
    row_order: RowOrder | None = None,
) -> Tensor:
    """Returns [B, T] G_t = min of the rewards of the steps that end at t or later; 0 after the last step."""
    rewards_at_ends = torch.where(step_mask.bool(), process_rewards, torch.inf)
    minima = rewards_at_ends.flip(-1).cummin(-1).values.flip(-1)
    if row_order is not None and minima.shape[-1]:
        for rows, next_rows in row_order.backwards():  # later rows of a trajectory have later steps
            next_minima = torch.where(next_rows >= 0, minima[next_rows, 0], torch.inf).unsqueeze(-1)
            minima[rows] = torch.minimum(minima[rows], next_minima)
    return zero_outside_mask(torch.where(minima.isinf(), 0.0, minima), response_mask)


def total_min_form_returns(
    token_level_rewards: Tensor,
    process_rewards: Tensor,
    step_mask: Tensor,
    response_mask: Tensor,
    row_order: RowOrder | None = None,
) -> Tensor:
    """Returns [B, T] the minimum of future process rewards plus the sum of other future rewards."""
    other_rewards = token_level_rewards - zero_outside_mask(process_rewards, step_mask)
    min_returns = min_form_returns(process_rewards, step_mask, response_mask, row_order)
    return rewards_to_go(other_rewards, response_mask, 1.0, row_order) + min_returns


def step_lengths(step_mask: Tensor, response_mask: Tensor) -> Tensor:
    """Returns [B, T]: at a step's last token, the number of the step's earlier policy tokens; 0 elsewhere."""
    mask, ends = response_mask.bool(), step_mask.bool()
    count = (mask & ~ends).int().cumsum(-1)  # tokens so far that end no step
    # The count never decreases, so its running maximum over ends is the count at the previous end.
    previous_count = pad(torch.where(ends, count, 0).cummax(-1).values, (1, 0))[..., :-1]
    return zero_outside_mask(count - previous_count, ends)


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
    log_ratio: Tensor,
    outcome: Tensor,
    response_mask: Tensor,
    beta: float,
    contrast_logits: Tensor | None,
) -> Tensor:
    """Returns the loss [B] of each response: the cross-entropy of σ(β · Σ log-ratio) with its outcome.

    With `contrast_logits` (the result of `mean_contrast_logits`), the loss is −log σ(± (logit − contrast
    logit)), with plus for a correct response and minus for others.
    """
    logit = beta * masked_sum(log_ratio, response_mask, -1)
    if contrast_logits is None:
        return binary_cross_entropy_with_logits(logit, outcome.to(logit.dtype), reduction="none")
    return -logsigmoid((logit - contrast_logits) * torch.where(outcome > 0, 1.0, -1.0))


def mean_contrast_logits(logit: Tensor, outcome: Tensor, index: Labels) -> Tensor:
    """Returns [B] the mean logit of the responses with which each response is contrasted; 0 without any.

    They are the responses of the same group with a lower outcome, or with a higher outcome if the
    response's own outcome is 0.
    """
    ids = Groups.of(index).ids.to(logit.device)
    is_lower = outcome[None] < outcome[:, None]  # [B, B]: response, other response
    is_contrast = torch.where((outcome > 0)[:, None], is_lower, outcome[None] > outcome[:, None])
    is_contrast = is_contrast & (ids[None] == ids[:, None])
    return (is_contrast * logit[None]).sum(-1) / is_contrast.sum(-1).clamp(min=1)


def ranking_accuracy(logit: Tensor, outcome: Tensor, index: Labels) -> tuple[float, float]:
    """Returns the accuracy of pairs in a group, and the share of logits whose sign fits the outcome.

    A pair is right if its logits have the order of its outcomes, and its weight is the difference of its
    outcomes. Without pairs, the accuracy is 0.5.
    """
    ids = Groups.of(index).ids
    weights = (outcome[:, None] - outcome[None]).clamp(min=0) * (ids[:, None] == ids[None])
    total_weight = float(weights.sum())
    ordered_weight = float((weights * (logit[:, None] > logit[None])).sum())
    sign_accuracy = float(((logit > 0) == (outcome > 0.5)).double().mean())
    return (ordered_weight / total_weight if total_weight > 0 else 0.5), sign_accuracy
