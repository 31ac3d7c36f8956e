"""Sends a scorer to another process: a function by its import path, a callable object as a pickle."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping

from hone.plugins import load_object
from hone.rewards.failures import Failed, Scored
from hone.rewards.scorer import ScorerInput, score_row
from hone.rewards.scorer_code import describe
from hone.rewards.scores import symbolic, table
from hone.types import Fields, Function, Settings


def import_path_of(function: str | Function) -> str | Function:
    """Returns the import path of a function; returns a path or any other object unchanged."""
    name = getattr(function, "__qualname__", None)
    if name is None or isinstance(function, str):
        return function
    if "<" in name:
        raise TypeError(
            f"scorer {describe(function)} is local to another function, so a scoring process "
            "cannot import it. Define it at the top level of a file, or use the naive manager."
        )
    if function.__module__ == "__main__" or function.__module__.startswith("hone_extern_"):
        file = getattr(sys.modules.get(function.__module__), "__file__", None)
        if file is None:
            raise TypeError(
                f"scorer {describe(function)} is defined in an interactive session; write it to "
                "a file and set custom_reward_function.path, or use the naive manager."
            )
        return f"{file}:{name}"
    path = f"{function.__module__}:{name}"
    if load_object(path) != function:
        raise TypeError(
            f"scorer {path} is another function than the configured one, which may have its name "
            "from functools.wraps; give the function a name of its own, or use the naive manager."
        )
    return path


def row_scorer_keywords(compute_score: Function, options: Settings) -> Fields:
    """Returns the arguments of `make_row_scorer`, which another process calls."""
    bound_kwargs: Fields = {}
    function = compute_score
    while isinstance(function, functools.partial):
        if function.args:
            raise TypeError(f"bind arguments of {describe(function)} by name, not by position")
        bound_kwargs = {**function.keywords, **bound_kwargs}
        function = function.func

    registered_entries = {
        match: {
            source: dataclasses.replace(entry, target=import_path_of(entry.target))
            for source, entry in entries.items()
        }
        for match, entries in table.registered_scores().items()
    }
    return {
        "scorer": import_path_of(function),
        "bound_kwargs": bound_kwargs,
        "options": dict(options),
        "registered_entries": registered_entries,
    }


def make_row_scorer(
    scorer: str | Function,
    bound_kwargs: Settings,
    options: Settings,
    registered_entries: Mapping[str, Mapping[str, table.Entry]],
) -> Callable[..., Scored | Failed]:
    """Returns the function that scores rows in a scoring process."""
    table.restore_scores(registered_entries)
    function = load_object(scorer) if isinstance(scorer, str) else scorer
    if bound_kwargs:
        function = functools.partial(function, **bound_kwargs)
    symbolic.num_processes = 1  # a scoring process already runs on every core
    uses_table = function is table.default_compute_score

    def score(row: ScorerInput, comparisons: symbolic.Comparisons) -> Scored | Failed:
        symbolic.add_to_cache(comparisons)
        scorer_of_row = table.scorer_of(row.data_source)[1] if uses_table else function
        return score_row(scorer_of_row, row, options)

    return score
