"""RLOO over token-level returns, for process rewards (PURE, 2504.15275).

The baseline is the mean return a token of the group's other responses, over their true lengths:
padding does not dilute it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hone.algorithms.advantages.chain import Chain, rewards_to_go
from hone.algorithms.advantages.outcome import Labels, outcomes
from hone.algorithms.credit import STRICT_MIN, min_form
from hone.algorithms.keywords import estimator
from hone.algorithms.settings import setting
from hone.ops.masked import masked_fill_zero


@estimator
def rloo_token(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels | None = None,
    config: Any = None,
    *,
    trajectory_id: Labels | None = None,
    step_mask: Tensor | None = None,
    credit_assignment: float | str | None = None,
    gamma: float | None = None,
    **parts: Any,
) -> tuple[Tensor, Tensor]:
    """A_t = G_t − Σ_{j≠i} Σ_t G_j / Σ_{j≠i} len_j; a group of one has no baseline.

    `credit_assignment` is reward_model.credit_assignment; the strict minimum reads the column
    `reward/process` and `step_mask`. Otherwise G is the (discounted) sum of rewards to come.
    """
    if credit_assignment == STRICT_MIN:
        process = parts.get("reward/process")
        if process is None or step_mask is None:
            raise ValueError(
                f"credit_assignment={STRICT_MIN!r} needs the columns 'reward/process' and "
                "'step_mask', which the process reward model writes"
            )
        returns = min_form(token_level_rewards, process, step_mask, response_mask)
    else:
        gamma = setting(config, "gamma", "algorithm") if gamma is None else gamma
        chain = Chain.of(index, trajectory_id, token_level_rewards)
        returns = rewards_to_go(token_level_rewards, response_mask, gamma, chain)
    # Outcomes of the returns: per trajectory, their sum over tokens and the number of tokens.
    outcome = outcomes("rloo_token", returns, response_mask, index, trajectory_id)
    groups, totals, lengths = outcome.groups, outcome.scores, outcome.lengths
    others = groups.sum(totals)[groups.ids] - totals
    other_tokens = groups.sum(lengths)[groups.ids] - lengths
    baseline = others / other_tokens.clamp(min=1)
    per_row = baseline if outcome.rows is None else baseline[outcome.rows]
    advantages = returns - per_row.to(returns.dtype).unsqueeze(-1)
    return masked_fill_zero(advantages, response_mask), returns
