"""The naive manager: rows one after another in this process; async scorers all at once.

Deadlines here are soft (see `deadline.py`). A scorer that may hang in C code belongs in `prime`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from functools import partial

from hone.event_loop import as_exception, run_coroutine
from hone.rewards.calling import taken_arguments
from hone.rewards.deadline import DeadlineExceeded, call_with_deadline
from hone.rewards.failures import Failed, Scored, SetupError
from hone.rewards.managers.rule import RuleRewardManager
from hone.rewards.outcome import Response, failed_by, read_result, score_row
from hone.rewards.symbolic_batch import compare_ahead
from hone.types import Function


class NaiveRewardManager(RuleRewardManager):
    """One call of the scorer a row."""

    def score_rows(self, rows: Sequence[Response]) -> list[Scored | Failed]:
        function = self.compute_score
        if inspect.iscoroutinefunction(getattr(function, "func", function)):
            return run_coroutine(self.gather(rows))
        compare_ahead(self.compute_score, rows, self.options)
        return [self.score_one(row) for row in rows]

    def score_one(self, row: Response) -> Scored | Failed:
        """Score under the soft deadline."""
        work = partial(score_row, self.compute_score, row, self.options)
        try:
            return call_with_deadline(work, self.policy.timeout_s)
        except DeadlineExceeded:
            return self.late()

    async def gather(self, rows: Sequence[Response]) -> list[Scored | Failed]:
        """Await all rows together, each under its own deadline."""
        return list(await asyncio.gather(*(self.await_one(row) for row in rows)))

    async def await_one(self, row: Response) -> Scored | Failed:
        """One row of an async scorer."""
        function: Function = self.compute_score
        arguments = taken_arguments(function, row.arguments(), self.options)
        try:
            call = asyncio.ensure_future(function(**arguments))
            done, _ = await asyncio.wait({call}, timeout=self.policy.timeout_s)
            if not done:
                call.cancel()  # not waited for: it may swallow that; the event loop's end sees to it
                return self.late()
            if call.cancelled():
                raise RuntimeError("it cancelled itself (asyncio.CancelledError)")
            return read_result(call.result())
        except SetupError:
            raise
        except Exception as error:  # a user's scorer may raise anything; the policy decides
            return failed_by(error, self.compute_score)
        except SystemExit as error:  # the event loop goes on past it
            return failed_by(as_exception(error), self.compute_score)

    def late(self) -> Failed:
        """The failure of a scorer that passed its deadline."""
        return Failed("timeout", f"no score after {self.policy.timeout_s:g} s")
