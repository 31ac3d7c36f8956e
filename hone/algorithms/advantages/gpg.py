"""GPG (2504.02546): group-centred scores, scaled up for the share of samples that score nothing."""

from __future__ import annotations

from dataclasses import dataclass

from hone.algorithms.advantages.estimator import Estimator, Pair, Trajectories, VerlForm
from hone.algorithms.advantages.outcome import outcomes


@dataclass(frozen=True)
class GPG(Estimator):
    """A = α·(R − mean_g)/f_norm with α = trajectories / trajectories whose score is not 0."""

    f_norm: float = 1.0

    groups = "compared"

    def __post_init__(self) -> None:
        if self.f_norm == 0:
            raise ValueError("gpg: f_norm divides the advantages and cannot be 0")

    def __call__(self, batch: Trajectories) -> Pair:
        outcome = outcomes("gpg", batch.rewards, batch.mask, batch.uid, batch.trajectory_id)
        scores = outcome.scores
        alpha = len(scores) / scores.count_nonzero().double().clamp(min=1)
        spread = outcome.spread(alpha * (scores - outcome.baseline()) / self.f_norm)
        return spread, spread


gpg = VerlForm("gpg", GPG)
