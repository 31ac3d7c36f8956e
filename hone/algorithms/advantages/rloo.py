"""Leave-one-out baselines: RLOO over scores, and over token returns for process rewards."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hone.algorithms.advantages.estimator import Estimator, Pair, Trajectories, VerlForm
from hone.algorithms.advantages.outcome import outcomes
from hone.algorithms.advantages.returns import Chain, rewards_to_go
from hone.algorithms.credit import STRICT_MIN, min_form
from hone.ops.masked import masked_fill_zero


@dataclass(frozen=True)
class RLOOToken(Estimator):
    """A_t = G_t − Σ_{j≠i} Σ_t G_j / Σ_{j≠i} len_j (PURE, 2504.15275); a group of one has no baseline.

    `credit_assignment` is reward_model.credit_assignment if a process reward model scores steps;
    the strict minimum reads the columns `reward/process` and `step_mask`. Otherwise G is the
    (discounted) sum of future rewards.
    """

    gamma: float
    credit_assignment: float | str | None = None

    groups = "required"

    @property
    def requires(self) -> tuple[str, ...]:
        return ("reward/process", "step_mask") if self.credit_assignment == STRICT_MIN else ()

    def __call__(self, batch: Trajectories) -> Pair:
        if self.credit_assignment == STRICT_MIN:
            process, steps = batch.columns.get("reward/process"), batch.columns.get("step_mask")
            if process is None or steps is None:
                raise ValueError(
                    f"credit_assignment={STRICT_MIN!r} needs the columns 'reward/process' and "
                    "'step_mask', which the process reward model writes"
                )
            returns = min_form(batch.rewards, process, steps, batch.mask)
        else:
            chain = Chain.of(batch.uid, batch.trajectory_id, batch.rewards)
            returns = rewards_to_go(batch.rewards, batch.mask, self.gamma, chain)
        # Per trajectory: the sum of returns over tokens and the number of tokens.
        outcome = outcomes("rloo_token", returns, batch.mask, batch.uid, batch.trajectory_id)
        groups, totals, lengths = outcome.groups, outcome.scores, outcome.lengths
        others = groups.sum(totals)[groups.ids] - totals
        other_tokens = groups.sum(lengths)[groups.ids] - lengths
        baseline = others / other_tokens.clamp(min=1)
        per_row = baseline if outcome.rows is None else baseline[outcome.rows]
        advantages = returns - per_row.to(returns.dtype).unsqueeze(-1)
        return masked_fill_zero(advantages, batch.mask), returns


@dataclass(frozen=True)
class RLOO(Estimator):
    """A = R − mean of the group's other scores = (R − mean_g)·n/(n−1); a group of one keeps its raw R.

    With the strict minimum of process rewards, which is a token return, it equals `rloo_token`.
    """

    credit_assignment: float | str | None = None

    groups = "compared"

    @property
    def requires(self) -> tuple[str, ...]:
        return RLOOToken(1.0, self.credit_assignment).requires

    def __call__(self, batch: Trajectories) -> Pair:
        if self.credit_assignment == STRICT_MIN:
            return RLOOToken(1.0, STRICT_MIN)(batch)
        outcome = outcomes("rloo", batch.rewards, batch.mask, batch.uid, batch.trajectory_id)
        size = outcome.groups.sizes[outcome.groups.ids]
        scale = torch.where(size > 1, size / (size - 1).clamp(min=1), 1.0)
        spread = outcome.spread((outcome.scores - outcome.baseline()) * scale)
        return spread, spread


rloo = VerlForm("rloo", RLOO)
rloo_token = VerlForm("rloo_token", RLOOToken)
