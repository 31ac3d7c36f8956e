"""The range of every number that has one: types with bounds, written where the field is.

A bound that depends on another key is a check, not a range.
"""

from __future__ import annotations

import functools
import math
import typing
from dataclasses import dataclass
from typing import Annotated

from hone.config.convert import show_value
from hone.config.keys import Hint, Value, get, walk_fields


@dataclass(frozen=True)
class Range:
    """Bounds of a number; `above` excludes the bound itself. `-1` may stand for none."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    minus_one: bool = False

    def holds(self, value: float) -> bool:
        """True when the number lies inside."""
        if not math.isfinite(value):
            return False
        if self.minus_one and value == -1:
            return True
        low = self.least is None or value >= self.least
        over = self.above is None or value > self.above
        return low and over and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        parts = [] if self.least is None else [f"{show_value(self.least)} or more"]
        parts += [] if self.above is None else [f"above {show_value(self.above)}"]
        parts += [] if self.most is None else [f"at most {show_value(self.most)}"]
        return " and ".join(parts) + (", or -1" if self.minus_one else "")


Count = Annotated[int, Range(least=1)]
CountOrZero = Annotated[int, Range(least=0)]
CountOrAll = Annotated[int, Range(least=1, minus_one=True)]
TopK = Annotated[int, Range(least=0, minus_one=True)]
NotNegative = Annotated[float, Range(least=0)]
Positive = Annotated[float, Range(above=0)]
Share = Annotated[float, Range(least=0, most=1)]
PositiveShare = Annotated[float, Range(above=0, most=1)]
AboveOne = Annotated[float, Range(above=1)]
OneOrMore = Annotated[float, Range(least=1)]


@functools.cache
def ranges(root: type) -> dict[str, Range]:
    """The bounds of every leaf of a tree that has some."""
    found: dict[str, Range] = {}
    for key, owner, *_ in walk_fields(root):
        hint = _annotated(owner)[key.rpartition(".")[2]]
        for part in (hint, *typing.get_args(hint)):
            for bounds in getattr(part, "__metadata__", ()):
                found[key] = bounds
    return found


@functools.cache
def _annotated(cls: type) -> dict[str, Hint]:
    return typing.get_type_hints(cls, include_extras=True)


def out_of_range(config: Value, keys: typing.Container[str]) -> dict[str, str]:
    """One sentence for every number of these keys outside its range."""
    problems = {}
    root: type = type(config)
    for key, bounds in ranges(root).items():
        value = get(config, key) if key in keys else None
        if isinstance(value, int | float) and not bounds.holds(value):
            problems[key] = f"{key}={show_value(value)} is out of range; use {bounds}"
    return problems
