"""RLOO over token-level returns, for process rewards (PURE, 2504.15275).

The baseline is the mean return per token of the group's other responses, over their true lengths:
padding does not dilute it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hone.algorithms.advantages.chain import Chain, rewards_to_go
from hone.algorithms.advantages.estimator import Estimator, Pair, Trajectories, VerlForm
from hone.algorithms.advantages.outcome import outcomes
from hone.algorithms.credit import STRICT_MIN, min_form
from hone.ops.masked import masked_fill_zero


@dataclass(frozen=True)
class RLOOToken(Estimator):
    """A_t = G_t − Σ_{j≠i} Σ_t G_j / Σ_{j≠i} len_j; a group of one has no baseline.

    `credit_assignment` is reward_model.credit_assignment where a process reward model judges steps;
    the strict minimum reads the columns `reward/process` and `step_mask`. Otherwise G is the
    (discounted) sum of rewards to come.
    """

    gamma: float
    credit_assignment: float | str | None = None

    groups = "required"

    @property
    def requires(self) -> tuple[str, ...]:
        return ("reward/process", "step_mask") if self.credit_assignment == STRICT_MIN else ()

    def _returns(self, batch: Trajectories) -> Tensor:
        if self.credit_assignment == STRICT_MIN:
            process, steps = batch.columns.get("reward/process"), batch.columns.get("step_mask")
            if process is None or steps is None:
                raise ValueError(
                    f"credit_assignment={STRICT_MIN!r} needs the columns 'reward/process' and "
                    "'step_mask', which the process reward model writes"
                )
            return min_form(batch.rewards, process, steps, batch.mask)
        chain = Chain.of(batch.uid, batch.trajectory_id, batch.rewards)
        return rewards_to_go(batch.rewards, batch.mask, self.gamma, chain)

    def __call__(self, batch: Trajectories) -> Pair:
        returns = self._returns(batch)
        # Outcomes of the returns: per trajectory, their sum over tokens and the number of tokens.
        outcome = outcomes("rloo_token", returns, batch.mask, batch.uid, batch.trajectory_id)
        groups, totals, lengths = outcome.groups, outcome.scores, outcome.lengths
        others = groups.sum(totals)[groups.ids] - totals
        other_tokens = groups.sum(lengths)[groups.ids] - lengths
        baseline = others / other_tokens.clamp(min=1)
        per_row = baseline if outcome.rows is None else baseline[outcome.rows]
        advantages = returns - per_row.to(returns.dtype).unsqueeze(-1)
        return masked_fill_zero(advantages, batch.mask), returns


rloo_token = VerlForm("rloo_token", RLOOToken)
