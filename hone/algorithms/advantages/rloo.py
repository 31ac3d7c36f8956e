"""Leave-one-out baselines: RLOO over scores, and over token returns for process rewards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hone.algorithms.advantages.estimator import Estimate, Estimator, Trajectories, VerlForm
from hone.algorithms.advantages.outcome import Outcomes, outcomes
from hone.algorithms.advantages.returns import Chain, rewards_to_go
from hone.algorithms.credit import STRICT_MIN, min_form, step_lengths
from hone.ops.masked import zero_outside_mask


@dataclass(frozen=True)
class RLOOToken(Estimator):
    """A_t = G_t − Σ_{j≠i} Σ_t G_j / Σ_{j≠i} len_j (PURE, 2504.15275); a group of one has no baseline.

    `credit_assignment` is reward_model.credit_assignment if a process reward model scores steps;
    the strict minimum reads the columns `reward/process` and `step_mask`. Otherwise G is the
    (discounted) sum of future rewards. `process_baseline` step or token subtracts a baseline from each
    step reward, and the mean of the other responses' scores from the rest, instead of the baseline of
    returns.
    """

    gamma: float
    credit_assignment: float | str | None = None
    process_baseline: str = "return"

    groups = "required"

    @property
    def requires(self) -> tuple[str, ...]:
        if self.process_baseline != "return":
            return ("reward/process", "step_mask", "token_level_scores")
        return ("reward/process", "step_mask") if self.credit_assignment == STRICT_MIN else ()

    def __call__(self, batch: Trajectories) -> Estimate:
        missing = [name for name in self.requires if batch.columns.get(name) is None]
        if missing:
            raise ValueError(
                f"credit_assignment={self.credit_assignment!r} with process_baseline="
                f"{self.process_baseline!r} needs the columns {', '.join(self.requires)}; "
                f"{', '.join(missing)} is missing, which the process reward model writes"
            )
        chain = Chain.of(batch.uid, batch.trajectory_id, batch.rewards)
        if self.credit_assignment == STRICT_MIN:
            process, steps = batch.columns["reward/process"], batch.columns["step_mask"]
            returns = min_form(batch.rewards, process, steps, batch.mask, chain)
        else:
            returns = rewards_to_go(batch.rewards, batch.mask, self.gamma, chain)
        if self.process_baseline != "return":
            return self._step_advantages(batch, chain), returns
        # Per trajectory: the sum of returns over tokens and the number of tokens.
        outcome = outcomes("rloo_token", returns, batch.mask, batch.uid, batch.trajectory_id)
        baseline = _leave_one_out(outcome, outcome.scores, outcome.lengths)
        return zero_outside_mask(returns - baseline, batch.mask), returns

    def _step_advantages(self, batch: Trajectories, chain: Chain | None) -> Tensor:
        """[B, T] future rewards, where each step reward is reduced by a baseline per step or per token."""
        process, steps = batch.columns["reward/process"], batch.columns["step_mask"].bool()
        process = zero_outside_mask(process, steps)
        outcome = outcomes("rloo_token", process, batch.mask, batch.uid, batch.trajectory_id)
        ones = torch.ones_like(outcome.lengths)
        if self.process_baseline == "token":
            per_token = _leave_one_out(outcome, outcome.scores, outcome.lengths)
            baselines = per_token * step_lengths(steps, batch.mask)
        else:
            counts = outcome.total(steps.sum(-1).double()).clamp(min=1)
            baselines = _leave_one_out(outcome, outcome.scores / counts, ones) * steps
        returns = rewards_to_go(batch.rewards - baselines, batch.mask, self.gamma, chain)
        other_scores = batch.columns["token_level_scores"] - process
        others = outcomes("rloo_token", other_scores, batch.mask, batch.uid, batch.trajectory_id)
        return zero_outside_mask(returns - _leave_one_out(others, others.scores, ones), batch.mask)


def _leave_one_out(outcome: Outcomes, values: Tensor, weights: Tensor) -> Tensor:
    """[B, 1] Σ_{j≠i} values / Σ_{j≠i} weights over the other trajectories of the group; 0 without others."""
    groups = outcome.groups
    total, weight = (groups.sum(x)[groups.ids] - x for x in (values, weights))
    ratio = total / weight.clamp(min=1)
    per_row = ratio if outcome.rows is None else ratio[outcome.rows]
    return per_row.to(outcome.rewards.dtype).unsqueeze(-1)


@dataclass(frozen=True)
class RLOO(Estimator):
    """A = R − mean of the group's other scores = (R − mean_g)·n/(n−1); a group of one keeps its raw R.

    With process rewards, which are rewards of tokens, it equals `rloo_token` without discount, as in PURE.
    """

    credit_assignment: float | str | None = None
    process_baseline: str = "return"

    groups = "compared"

    @property
    def requires(self) -> tuple[str, ...]:
        return () if self.credit_assignment is None else self._token_estimator.requires

    @property
    def _token_estimator(self) -> RLOOToken:
        return RLOOToken(1.0, self.credit_assignment, self.process_baseline)

    def __call__(self, batch: Trajectories) -> Estimate:
        if self.credit_assignment is not None:
            return self._token_estimator(batch)
        outcome = outcomes("rloo", batch.rewards, batch.mask, batch.uid, batch.trajectory_id)
        size = outcome.groups.sizes[outcome.groups.ids]
        scale = torch.where(size > 1, size / (size - 1).clamp(min=1), 1.0)
        advantages = outcome.broadcast((outcome.scores - outcome.baseline()) * scale)
        return advantages, advantages


rloo = VerlForm("rloo", RLOO)
rloo_token = VerlForm("rloo_token", RLOOToken)
