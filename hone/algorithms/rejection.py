"""Rejection of tokens or sequences whose rollout and training log-probs disagree too much.

`log_ratio` is x = log(train / rollout) at each token, bounded at ±20. The options bound k1 = −x,
k2 = ½·x² or k3 = e^x − 1 − x. Bounds of k1 options are bounds of the ratio train/rollout; k2 and k3 have
one upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from hone.ops.masked import masked_mean, masked_sum, zero_outside_mask

Bound = float | str
"""A bound in the format of `algorithm.rollout_correction`: 2.0, "0.5_2.0"."""
OptionNames = str | Sequence[str] | None
"""Names from OPTIONS, as a list or a comma-separated string."""
Bounds = Bound | Sequence[Bound] | None
EXPONENT_BOUND = 20.0
_THRESHOLD_KEY = "algorithm.rollout_correction.rollout_rs_threshold"

OPTIONS = (
    *(f"token_k{n}" for n in (1, 2, 3)),
    *(f"seq_sum_k{n}" for n in (1, 2, 3)),
    *(f"seq_mean_k{n}" for n in (1, 2, 3)),
    "seq_max_k2",
    "seq_max_k3",
)


@dataclass(frozen=True)
class RejectionResult:
    """The values of one option, its bounds and the tokens that it keeps."""

    values: Tensor  # [B, T] for token options, [B] for sequence options
    low: float
    high: float
    keep_mask: Tensor  # [B, T] bool


def rejection_mask(
    log_ratio: Tensor, mask: Tensor, options: OptionNames, bounds: Bounds
) -> tuple[Tensor, dict[str, RejectionResult]]:
    """Returns a mask of the tokens that pass every option, and the result of each option."""
    keep_mask = mask.bool()
    log_ratio = zero_outside_mask(log_ratio, mask).clamp(-EXPONENT_BOUND, EXPONENT_BOUND)
    results = {
        option: _apply_option(option, log_ratio, mask.bool(), bound)
        for option, bound in _options_with_bounds(options, bounds)
    }
    for result in results.values():
        keep_mask = keep_mask & result.keep_mask
    return keep_mask, results


def catastrophic_tokens(log_ratio: Tensor, mask: Tensor, threshold: float) -> Tensor:  # [B, T] bool
    """Returns a mask of the tokens whose ratio train/rollout is below `threshold`."""
    return mask.bool() & (log_ratio < math.log(threshold))


def _options_with_bounds(options: OptionNames, bounds: Bounds) -> list[tuple[str, Bound]]:
    """Returns the options with their bounds; raises for an unknown option or a wrong number of bounds."""
    names, values = [str(name) for name in split_list(options)], split_list(bounds)
    for option in names:
        if option not in OPTIONS:
            raise ValueError(
                f"algorithm.rollout_correction.rollout_rs has {option!r}, which is unknown; "
                f"use any of {', '.join(OPTIONS)}"
            )
    if len(values) == 1:
        values = values * len(names)
    if len(values) != len(names):
        raise ValueError(
            f"{_THRESHOLD_KEY}={bounds!r} has {len(values)} bounds for {len(names)} rejection options "
            f"({', '.join(names)}); give one for all options or one for each, separated by commas"
        )
    return list(zip(names, values, strict=True))


def _apply_option(option: str, log_ratio: Tensor, mask: Tensor, bound: Bound) -> RejectionResult:
    level, estimator = option.rsplit("_", 1)
    if estimator == "k1":
        min_ratio, max_ratio = parse_ratio_band(bound, _THRESHOLD_KEY)
        low, high = -math.log(max_ratio), -math.log(min_ratio)  # k1 decreases with the ratio
        per_token = -log_ratio
    else:
        bounds = parse_bound(bound, _THRESHOLD_KEY)
        if len(bounds) != 1:
            raise ValueError(
                f"{_THRESHOLD_KEY}={bound!r}: {estimator} takes one upper bound, such as 0.01"
            )
        low, high = -math.inf, bounds[0]
        is_k3 = estimator == "k3"
        per_token = log_ratio.exp() - 1 - log_ratio if is_k3 else 0.5 * log_ratio**2
    match level:
        case "token":
            values = per_token
        case "seq_sum":
            values = masked_sum(per_token, mask, -1)
        case "seq_mean":
            values = masked_mean(per_token, mask, -1)
        case _:
            # k2 and k3 are never negative; the added column makes the value of an empty row 0.
            values = pad(zero_outside_mask(per_token, mask), (0, 1)).amax(-1)
    in_bounds = (values >= low) & (values <= high)
    keep_mask = mask & (in_bounds if values.dim() == 2 else in_bounds[:, None])
    return RejectionResult(values, low, high, keep_mask)


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
            f'{key}={value!r} is not a bound; write one number above 0 (2.0) or "lo_hi" ("0.5_2.0")'
        )
    return bounds


def parse_ratio_band(value: Bound, key: str) -> tuple[float, float]:
    """Parses the bounds of a ratio; a single number hi means 1/hi … hi."""
    bounds = parse_bound(value, key)
    if len(bounds) == 2:
        return bounds[0], bounds[1]
    if bounds[0] < 1:
        raise ValueError(
            f"{key}={value!r}: a single bound of a ratio must be 1 or more; it allows 1/hi … hi"
        )
    return 1 / bounds[0], bounds[0]
