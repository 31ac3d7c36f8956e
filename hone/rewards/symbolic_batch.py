"""The symbolic comparisons of a batch, made together before its rows are scored one by one.

Ten hostile expressions then cost what one costs, divided by the cores, and all of them one budget.
"""

from __future__ import annotations

from collections.abc import Sequence

from hone.rewards.failures import Failed
from hone.rewards.outcome import Response, score_row
from hone.rewards.places import unbound
from hone.rewards.scores import symbolic, table
from hone.types import Function, Settings

Comparisons = dict[symbolic.Pair, bool | Failed]


def compare_ahead(
    compute_score: Function, rows: Sequence[Response], options: Settings
) -> list[Comparisons]:
    """Make what our own rules will ask for; each row's comparisons, for another process.

    A user's own score function is not called: it may not bear to be called twice.
    """
    pairs = [_asked(compute_score, row, options) for row in rows]
    symbolic.compare_all(pair for of_row in pairs for pair in of_row)
    return [symbolic.known(of_row) for of_row in pairs]


def _asked(compute_score: Function, row: Response, options: Settings) -> list[symbolic.Pair]:
    if not _compares_expressions(compute_score, row):
        return []
    with symbolic.noting() as pairs:
        score_row(compute_score, row, options)
    return pairs


def _compares_expressions(compute_score: Function, row: Response) -> bool:
    if table.is_table(compute_score):
        entry = table.find(row.data_source)
        return entry is not None and entry.symbolic
    return getattr(unbound(compute_score), "__module__", None) in table.SYMBOLIC_MODULES
