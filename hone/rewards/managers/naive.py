"""The naive manager: scores rows one by one in this process; an async scorer runs concurrently.

The deadlines are soft (see `calling.py`). Use `prime` for a scorer that may hang in C code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from hone.event_loop import as_exception, run_coroutine
from hone.rewards.calling import (
    DeadlineExceeded,
    accepted_arguments,
    call_with_deadline,
    is_async,
    unwrap_function,
)
from hone.rewards.failures import Failed, Scored, SetupError
from hone.rewards.managers.rule import RuleRewardManager
from hone.rewards.outcome import (
    ScorerInput,
    exception_failure,
    precompute_comparisons,
    read_result,
    score_row,
)
from hone.types import Function


class NaiveRewardManager(RuleRewardManager):
    """Calls the scorer once per row."""

    def score_rows(self, rows: Sequence[ScorerInput]) -> list[Scored | Failed]:
        function = self.compute_score
        if is_async(function):
            return run_coroutine(self._await_all(rows))
        precompute_comparisons(function, rows, self.options)
        return [self._score_one(row) for row in rows]

    def _score_one(self, row: ScorerInput) -> Scored | Failed:
        call = partial(score_row, self.compute_score, row, self.options)
        try:
            return call_with_deadline(call, self.failure_policy.timeout_s)
        except DeadlineExceeded:
            return self.timeout_failure()

    async def _await_all(self, rows: Sequence[ScorerInput]) -> list[Scored | Failed]:
        """Awaits all rows concurrently, each with its own deadline."""
        return list(await asyncio.gather(*map(self._await_one, rows)))

    async def _await_one(self, row: ScorerInput) -> Scored | Failed:
        function: Function = self.compute_score
        arguments = accepted_arguments(function, row.arguments(), self.options)
        try:
            call = asyncio.ensure_future(function(**arguments))
            functions = function, unwrap_function(function)
            has_own_deadline = any(getattr(f, "has_own_deadline", False) for f in functions)
            timeout_s = None if has_own_deadline else self.failure_policy.timeout_s
            done, _ = await asyncio.wait({call}, timeout=timeout_s)
            if not done:
                call.cancel()  # not awaited, because the call may ignore the cancellation
                return self.timeout_failure()
            if call.cancelled():
                raise RuntimeError("the call cancelled itself (asyncio.CancelledError)")
            return read_result(call.result())
        except SetupError:
            raise
        except Exception as error:  # a user's scorer may raise anything; the failure policy applies
            return exception_failure(error, function)
        except SystemExit as error:  # a scorer's exit fails only its row
            return exception_failure(as_exception(error), function)
