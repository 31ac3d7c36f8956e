"""The ranges of numbers in the schema, and the bounds of `algorithm.rollout_correction`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from hone.config.convert import show_value
from hone.suggestions import suggestion


@dataclass(frozen=True)
class Range:
    """Bounds of a number: `least` and `most` are in the range, `above` is not; `minus_one` also allows -1."""

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
        phrases = [
            template.format(show_value(bound))
            for template, bound in templates.items()
            if math.isfinite(bound)
        ]
        return " and ".join(phrases) + (", or -1" if self.minus_one else "")


Count = Annotated[int, Range(least=1)]
CountOrZero = Annotated[int, Range(least=0)]
CountOrAll = Annotated[int, Range(least=1, minus_one=True)]
TopK = Annotated[int, Range(least=0, minus_one=True)]
NotNegative = Annotated[float, Range(least=0)]
Positive = Annotated[float, Range(above=0)]
Fraction = Annotated[float, Range(least=0, most=1)]
PositiveFraction = Annotated[float, Range(above=0, most=1)]
AboveOne = Annotated[float, Range(above=1)]
OneOrMore = Annotated[float, Range(least=1)]

Bound = float | str
"""An upper bound, or a lower and an upper bound as in `algorithm.rollout_correction`: 2.0, "0.5_2.0"."""
OptionNames = str | Sequence[str] | None
"""Names from REJECTION_OPTIONS, as a list or a comma-separated string."""
Bounds = Bound | Sequence[Bound] | None
IS_THRESHOLD_KEY = "algorithm.rollout_correction.rollout_is_threshold"
RS_THRESHOLD_KEY = "algorithm.rollout_correction.rollout_rs_threshold"
REJECTION_OPTIONS = (
    *(f"{level}_k{number}" for level in ("token", "seq_sum", "seq_mean") for number in (1, 2, 3)),
    "seq_max_k2",
    "seq_max_k3",
)


def rejection_bounds(options: OptionNames, bounds: Bounds) -> list[tuple[str, float, float]]:
    """Returns the lower and upper bound of k1, k2 or k3 for each rejection option; raises if invalid.

    Bounds of k1 = −log(train / rollout) are written as bounds of the ratio; k2 and k3 have one upper bound.
    """
    key = "algorithm.rollout_correction.rollout_rs"
    names, values = [str(name) for name in split_list(options)], split_list(bounds)
    for name in names:
        if name not in REJECTION_OPTIONS:
            raise ValueError(
                f"{key}={name} is unknown.{suggestion(name, REJECTION_OPTIONS)} Use "
                f"{', '.join(REJECTION_OPTIONS)}"
            )
    if names and not values:
        raise ValueError(f"{key}={','.join(names)} needs {RS_THRESHOLD_KEY}, for example 2.0")
    if len(values) == 1:
        values = values * len(names)
    if len(values) != len(names):
        raise ValueError(
            f"{RS_THRESHOLD_KEY}={show_value(bounds)} has {len(values)} bounds for {len(names)} "
            f"options ({', '.join(names)}); give one for all options, or one for each"
        )
    return [(name, *_value_range(name, bound)) for name, bound in zip(names, values, strict=True)]


def _value_range(option: str, bound: Bound) -> tuple[float, float]:
    """Returns the lower and upper bound of the values of a rejection option."""
    estimator, subject = option.rpartition("_")[2], f"{RS_THRESHOLD_KEY}={show_value(bound)}"
    *lower_bounds, high = parse_bound(bound, RS_THRESHOLD_KEY)
    if estimator != "k1":
        if lower_bounds:
            raise ValueError(f"{subject}: {estimator} takes one upper bound, such as 0.01")
        return -math.inf, high
    if not lower_bounds and high < 1:
        raise ValueError(
            f"{subject}: a single bound of a ratio must be 1 or more; it allows 1/hi … hi"
        )
    low = lower_bounds[0] if lower_bounds else 1 / high
    return -math.log(high), -math.log(low)  # k1 decreases with the ratio


def split_list(value: Bound | Sequence[Bound] | None) -> list[Bound]:
    """Converts a comma-separated string, a list, or one value to a list."""
    if value is None:
        return []
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, Sequence) else [value]


def parse_bound(value: Bound, key: str) -> tuple[float, ...]:
    """Parses `2.0` to (hi,) and `"0.5_2.0"` to (lo, hi); bounds must be positive and in order."""
    if isinstance(value, bool):
        raise TypeError(f"{key}={value!r}: a bound is a number, not a boolean")
    try:
        bounds = tuple(float(part) for part in str(value).split("_"))
    except ValueError:
        bounds = ()
    if len(bounds) not in (1, 2) or not all(x > 0 for x in bounds) or bounds[0] > bounds[-1]:
        raise ValueError(
            f"{key}={show_value(value)} is not a bound; write one number above 0 (2.0) or lo_hi (0.5_2.0)"
        )
    return bounds
