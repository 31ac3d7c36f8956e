"""Bounds as users write them in `algorithm.rollout_correction`: 2.0, "0.5_2.0", "0.99_1.01,0.01"."""

from __future__ import annotations

from collections.abc import Sequence

Bound = float | str


def split(value: Bound | Sequence[Bound] | None) -> list[Bound]:
    """A comma-separated string, a list, or one value, as a list."""
    if value is None:
        return []
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, Sequence) else [value]


def numbers(value: Bound, key: str) -> tuple[float, ...]:
    """(hi,) of `2.0`, (lo, hi) of `"0.5_2.0"`; all above 0 and in order."""
    if isinstance(value, bool):
        raise TypeError(f"{key}={value!r}: a bound is a number, not a boolean")
    try:
        parsed = tuple(float(part) for part in str(value).split("_"))
    except ValueError:
        parsed = ()
    if len(parsed) not in (1, 2) or not all(part > 0 for part in parsed) or parsed[0] > parsed[-1]:
        raise ValueError(
            f'{key}={value!r} is not a bound; write one number above 0 (2.0) or "lo_hi" ("0.5_2.0")'
        )
    return parsed


def ratio_band(value: Bound, key: str) -> tuple[float, float]:
    """Bounds of a ratio around 1; one number stands for 1/hi … hi."""
    bounds = numbers(value, key)
    if len(bounds) == 2:
        return bounds[0], bounds[1]
    if bounds[0] < 1:
        raise ValueError(
            f"{key}={value!r}: a single bound of a ratio must be 1 or more; it allows 1/hi … hi"
        )
    return 1 / bounds[0], bounds[0]
