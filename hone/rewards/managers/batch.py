"""The batch manager: one call of the scorer for the whole batch.

For scorers that work on lists (a model, a service). A call that fails fails every row, because
there is no telling which row it was; a bad value in the list fails its own row.
"""

from __future__ import annotations

from collections.abc import Sequence

from hone.rewards.calling import BATCH_ARGUMENTS, call_scorer
from hone.rewards.deadline import DeadlineExceeded, call_with_deadline
from hone.rewards.failures import Failed, Scored, SetupError
from hone.rewards.managers.rule import RuleRewardManager
from hone.rewards.outcome import Response, failed_by, read_result, score_row
from hone.rewards.symbolic_batch import compare_ahead


class BatchRewardManager(RuleRewardManager):
    """Calls `compute_score(data_sources, solution_strs, ground_truths, extra_infos)`."""

    arguments = BATCH_ARGUMENTS

    def score_rows(self, rows: Sequence[Response]) -> list[Scored | Failed]:
        if not rows:
            return []
        compare_ahead(self.compute_score, rows, self.options)
        try:
            return call_with_deadline(lambda: self.score_all(rows), self.policy.timeout_s)
        except DeadlineExceeded:
            late = Failed("timeout", f"no scores after {self.policy.timeout_s:g} s")
            return [late] * len(rows)

    def score_all(self, rows: Sequence[Response]) -> list[Scored | Failed]:
        """The scorer's list; the table of data sources has none, so its rows go one by one."""
        if self.uses_table:
            return [score_row(self.compute_score, row, self.options) for row in rows]
        columns = (
            [row.data_source for row in rows],
            [row.solution_str for row in rows],
            [row.ground_truth for row in rows],
            [row.extra_info for row in rows],
        )
        arguments = dict(zip(BATCH_ARGUMENTS, columns, strict=True))
        try:
            results = call_scorer(self.compute_score, arguments, self.options)
        except SetupError:
            raise
        except Exception as error:  # a user's scorer may raise anything; the policy decides
            return [failed_by(error, self.compute_score)] * len(rows)
        if not hasattr(results, "__len__") or len(results) != len(rows):
            got = len(results) if hasattr(results, "__len__") else type(results).__name__
            return [Failed("bad_return", f"{len(rows)} scores expected, got {got}")] * len(rows)
        return [read_result(result) for result in results]
