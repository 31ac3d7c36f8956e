"""Scores the rows of built-in symbolic rules, with the symbolic comparisons of a batch made together.

The scorer is called as if no comparison was equal, and its comparisons are recorded. If none of them is
equal, the result of this call is the outcome, and the scorer is not called again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from hone.rewards.failures import Failed, Scored
from hone.rewards.scorer import ScorerInput, call_with_deadline, score_row
from hone.rewards.scores import symbolic
from hone.types import Function, Settings


class FirstCall(NamedTuple):
    """The first call of the scorer of one row."""

    outcome: Scored | Failed | None
    """None if the row must be scored: no call was made, or a comparison is equal or failed."""
    comparisons: symbolic.Comparisons
    """The results of the comparisons, which are also in the cache of this process."""


def call_with_pairs_recorded(
    rows: Sequence[ScorerInput],
    scorers: Sequence[Function | None],
    options: Settings,
    timeout_s: float,
) -> list[FirstCall]:
    """Calls the scorer of each row that has one, and makes the comparisons of all rows together."""
    outcomes: list[Scored | Failed | None] = []
    pairs_by_row: list[list[symbolic.Pair]] = [[] for _ in rows]
    for row, scorer, pairs in zip(rows, scorers, pairs_by_row, strict=True):
        outcome = None
        if scorer is not None:
            call = partial(score_row, scorer, row, options)
            outcome = call_with_deadline(partial(symbolic.record_pairs, pairs, call), timeout_s)
        outcomes.append(outcome)
    if any(pairs_by_row):
        symbolic.compare_all(chain.from_iterable(pairs_by_row))
    calls = []
    for outcome, pairs in zip(outcomes, pairs_by_row, strict=True):
        comparisons = symbolic.cached_results(pairs) if pairs else {}
        is_final = all(comparisons.get(pair) is False for pair in pairs)
        calls.append(FirstCall(outcome if is_final else None, comparisons))
    return calls
