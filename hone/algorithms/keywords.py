"""Keyword arguments of estimators and losses: a misspelt one is an error, never ignored."""

from __future__ import annotations

from collections.abc import Iterable

from hone.config.errors import did_you_mean, nearest


def refuse_unknown(function: str, unknown: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for the first unknown keyword, with the known one most like it."""
    names = list(known)
    for name in unknown:
        raise TypeError(
            f"{function} takes no argument {name!r}.{did_you_mean(nearest(name, names))} "
            f"It takes {', '.join(names)}"
        )
