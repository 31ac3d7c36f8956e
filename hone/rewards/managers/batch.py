"""The batch manager calls the scorer once with the lists of the whole batch.

If the call fails, every row fails; an invalid value in the returned list fails only its row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hone.rewards.failures import Failed, Scored
from hone.rewards.managers.rule import RuleRewardManager
from hone.rewards.scorer import (
    BATCH_ARGUMENTS,
    ROW_ARGUMENTS,
    ScorerInput,
    call_scorer,
    call_with_deadline,
    counted_mishaps,
    failure_of,
    read_result,
    score_row,
)


class BatchRewardManager(RuleRewardManager):
    """Calls `compute_score(data_sources, solution_strs, ground_truths, extra_infos)`."""

    arguments = BATCH_ARGUMENTS

    def score_rows(self, rows: Sequence[ScorerInput]) -> list[Scored | Failed]:
        if not rows:
            return []
        timeout_s = self.failure_policy.timeout_s
        outcomes = call_with_deadline(lambda: self._score_all(rows), timeout_s)
        return [outcomes] * len(rows) if isinstance(outcomes, Failed) else outcomes

    def _score_all(self, rows: Sequence[ScorerInput]) -> list[Scored | Failed]:
        """Returns the scorer's results; the built-in rules are called row by row."""
        if self.uses_table:
            return [
                outcome or score_row(self.scorer_of(row), row, self.options)
                for row, (outcome, _) in zip(rows, self.score_symbolic_rows(rows), strict=True)
            ]
        arguments = {
            batch_name: [getattr(row, row_name) for row in rows]
            for batch_name, row_name in zip(BATCH_ARGUMENTS, ROW_ARGUMENTS, strict=True)
        }
        try:
            with counted_mishaps() as mishaps:
                results = call_scorer(self.compute_score, arguments, self.options)
                scores = list(results) if isinstance(results, Iterable) else None
        except (Exception, SystemExit) as error:  # a user's scorer may raise anything
            return [failure_of(error, self.compute_score, self.options)] * len(rows)
        self.failures.update(mishaps)
        if scores is None or len(scores) != len(rows):
            description = type(results).__name__ if scores is None else len(scores)
            problem = f"{len(rows)} scores expected, got {description}"
            return [Failed("bad_return", problem)] * len(rows)
        return [read_result(score) for score in scores]
