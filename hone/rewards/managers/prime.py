"""The prime manager scores rows in parallel processes, and replaces a process that exceeds the deadline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hone.cores import usable_cores
from hone.rewards.failures import Failed, Scored
from hone.rewards.managers.rule import RuleRewardManager
from hone.rewards.pool import DeadlinePool
from hone.rewards.scorer import ScorerInput
from hone.rewards.transport import row_scorer_keywords


class PrimeRewardManager(RuleRewardManager):
    """Scores batches with `num_processes` processes, by default one per core."""

    def __init__(self, *args: Any, num_processes: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_processes = num_processes or usable_cores()
        self.pool: DeadlinePool[Scored | Failed] | None = None

    def score_rows(self, rows: Sequence[ScorerInput]) -> list[Scored | Failed]:
        keywords = row_scorer_keywords(self.compute_score, self.options)
        if self.pool is not None and self.pool.keywords != keywords:
            self.close()  # a scorer was registered after the processes started
        if self.pool is None:
            factory = "hone.rewards.transport:make_row_scorer"
            self.pool = DeadlinePool(factory, keywords, self.num_processes)
        first_calls = self.score_symbolic_rows(rows)
        jobs = [
            {"row": row, "comparisons": comparisons}
            for row, (outcome, comparisons) in zip(rows, first_calls, strict=True)
            if outcome is None
        ]
        results = iter(self.pool.run(jobs, self.failure_policy.timeout_s))
        return [outcome or next(results) for outcome, _ in first_calls]

    def close(self) -> None:
        """Ends the scoring processes."""
        if self.pool is not None:
            self.pool.close()
            self.pool = None
