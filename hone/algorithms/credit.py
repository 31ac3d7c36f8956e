"""PURE (2504.15275): converts scores of reasoning steps to token rewards and returns.

A step's score is on its last token. Credit is assigned by a soft minimum, by the strict minimum over
the remaining steps, or by a plain sum. The process reward model itself runs elsewhere.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from hone.algorithms.advantages.returns import Chain, rewards_to_go
from hone.ops.masked import masked_fill_zero

GAMMA_DECAY = "gamma-decay"
STRICT_MIN = "strict min-form"


def step_ends(responses: Tensor, response_mask: Tensor, separator_ids: Tensor) -> Tensor:
    """[B, T] bool: tokens that end a step, and the last policy token."""
    mask = response_mask.bool()
    position = torch.arange(mask.shape[-1], device=mask.device)
    last = pad(torch.where(mask, position, -1), (0, 1), value=-1).amax(-1, keepdim=True)
    return mask & (torch.isin(responses, separator_ids) | (position == last))


def step_rewards(log_odds: Tensor) -> Tensor:
    """Log-odds of a good step, the difference of the two logits → p(good) − p(bad), in −1 … 1."""
    return torch.tanh(log_odds / 2)


def assign_credit(
    process_rewards: Tensor, step_mask: Tensor, credit_assignment: float | str
) -> Tensor:
    """[B, T] step rewards for the return computation; 0 where no step ends.

    A number T > 0 weights each step by softmax(−r/T) over its row, so that the sum tends to the
    row's minimum as T → 0. The two named forms do not change the rewards.
    """
    mask = step_mask.bool()
    rewards = masked_fill_zero(process_rewards, mask)
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
    share = torch.softmax(torch.where(mask, -rewards / temperature, -torch.inf), dim=-1)
    return masked_fill_zero(share * rewards, mask)


def min_form_returns(
    process_rewards: Tensor, step_mask: Tensor, response_mask: Tensor, chain: Chain | None = None
) -> Tensor:
    """[B, T] G_t = min of the rewards of the steps that end at t or later; 0 outside the mask.

    Tokens at which no step ends are not part of the minimum; after the last step G is 0.
    """
    ahead = torch.where(step_mask.bool(), process_rewards, torch.inf)
    lowest = ahead.flip(-1).cummin(-1).values.flip(-1)
    if chain is not None and lowest.shape[-1]:
        for rows, after in chain.backwards():  # later rows of the trajectory are steps to come
            beyond = torch.where(after >= 0, lowest[after, 0], torch.inf).unsqueeze(-1)
            lowest[rows] = torch.minimum(lowest[rows], beyond)
    return masked_fill_zero(torch.where(lowest.isinf(), 0.0, lowest), response_mask)


def min_form(
    token_level_rewards: Tensor,
    process_rewards: Tensor,
    step_mask: Tensor,
    response_mask: Tensor,
    chain: Chain | None = None,
) -> Tensor:
    """[B, T] returns under the strict minimum: process rewards are combined by the minimum, all other
    rewards (rule score, KL) by the sum.
    """
    rest = token_level_rewards - masked_fill_zero(process_rewards, step_mask)
    lowest = min_form_returns(process_rewards, step_mask, response_mask, chain)
    return rewards_to_go(rest, response_mask, 1.0, chain) + lowest


def tokens_of_steps(step_mask: Tensor, response_mask: Tensor) -> Tensor:
    """[B, T] at the end of each step the number of its policy tokens, without the one that ends it."""
    mask, ends = response_mask.bool(), step_mask.bool()
    inside = (mask & ~ends).int().cumsum(-1)  # tokens so far that end no step
    # The count at the previous end: `inside` never falls, so the running maximum over ends finds it.
    before = pad(torch.where(ends, inside, 0).cummax(-1).values, (1, 0))[..., :-1]
    return masked_fill_zero(inside - before, ends)
