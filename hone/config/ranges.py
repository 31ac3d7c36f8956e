"""The ranges of numbers in the schema."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from hone.config.convert import show_value


@dataclass(frozen=True)
class Range:
    """Bounds of a number; `above` excludes the bound itself. `minus_one` also allows -1."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    minus_one: bool = False

    def holds(self, value: float) -> bool:
        """Returns whether the number is in range."""
        is_inside = self.least <= value <= self.most and self.above < value
        return math.isfinite(value) and (is_inside or (self.minus_one and value == -1))

    def __str__(self) -> str:
        templates = {"{} or more": self.least, "above {}": self.above, "at most {}": self.most}
        parts = [text.format(show_value(b)) for text, b in templates.items() if math.isfinite(b)]
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
