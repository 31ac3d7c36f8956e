"""Rejection of tokens or sequences whose rollout and training log-probs disagree too much.

`log_ratio` is x = log(train / rollout) at each token, bounded at ±20. The options bound k1 = −x,
k2 = ½·x² or k3 = e^x − 1 − x. Bounds of k1 options are bounds of the ratio train/rollout; k2 and k3 have
one upper bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from hone.config.ranges import Bounds, OptionNames, rejection_bounds
from hone.ops.masked import masked_mean, masked_sum, zero_outside_mask

EXPONENT_BOUND = 20.0


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
        option: _apply_option(option, log_ratio, mask.bool(), low, high)
        for option, low, high in rejection_bounds(options, bounds)
    }
    for result in results.values():
        keep_mask = keep_mask & result.keep_mask
    return keep_mask, results


def catastrophic_tokens(log_ratio: Tensor, mask: Tensor, threshold: float) -> Tensor:  # [B, T] bool
    """Returns a mask of the tokens whose ratio train/rollout is below `threshold`."""
    return mask.bool() & (log_ratio < math.log(threshold))


def _apply_option(
    option: str, log_ratio: Tensor, mask: Tensor, low: float, high: float
) -> RejectionResult:
    level, estimator = option.rsplit("_", 1)
    match estimator:
        case "k1":
            per_token = -log_ratio
        case "k2":
            per_token = 0.5 * log_ratio**2
        case _:
            per_token = log_ratio.exp() - 1 - log_ratio
    match level:
        case "token":
            values = per_token
        case "seq_sum":
            values = masked_sum(per_token, mask, -1)
        case "seq_mean":
            values = masked_mean(per_token, mask, -1)
        case _:
            # k2 and k3 are never negative; the added 0 is the value of an empty row.
            values = pad(zero_outside_mask(per_token, mask), (0, 1)).amax(-1)
    in_bounds = (values >= low) & (values <= high)
    keep_mask = mask & (in_bounds if values.dim() == 2 else in_bounds[:, None])
    return RejectionResult(values, low, high, keep_mask)
