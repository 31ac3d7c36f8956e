"""Statistics over the entries a mask keeps.

Entries outside the mask never matter, not even NaN or infinity: they are replaced before any
arithmetic, so neither the value nor the gradient depends on them. Masks are read as booleans.
"""

from __future__ import annotations

import torch
from torch import Tensor

WHITEN_EPS = 1e-8


def masked_fill_zero(x: Tensor, mask: Tensor) -> Tensor:
    """`x` where the mask is set, 0 elsewhere."""
    return torch.where(mask.bool(), x, 0)


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Sum of the kept entries."""
    values = masked_fill_zero(values, mask)
    return values.sum() if axis is None else values.sum(dim=axis)


def count_kept(mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """The number of kept entries, as integers."""
    ones = mask.bool().view(torch.uint8)  # bytes add up many times faster than bools
    if axis is None:
        return ones.flatten().sum()
    return ones.sum(dim=axis, dtype=torch.int32)  # and into 32 bits faster than into 64


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Mean of the kept entries; 0 where the mask keeps none."""
    return masked_sum(values, mask, axis) / count_kept(mask.expand_as(values), axis).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of the kept entries; 0 where fewer than two are kept."""
    mean = masked_mean(values, mask)
    count = count_kept(mask.expand_as(values))
    squares = masked_sum((masked_fill_zero(values, mask) - mean) ** 2, mask)
    return squares / (count - 1 if unbiased else count).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Kept entries scaled to variance one (and mean zero unless `shift_mean` is off); 0 outside."""
    mean = masked_mean(values, mask)
    white = (masked_fill_zero(values, mask) - mean) * torch.rsqrt(
        masked_var(values, mask) + WHITEN_EPS
    )
    return masked_fill_zero(white if shift_mean else white + mean, mask)


def last_true(mask: Tensor) -> Tensor:
    """[B] column of the last nonzero entry in each row of a mask [B, T]; -1 where a row has none."""
    positions = torch.arange(mask.shape[1] + 1, device=mask.device)
    padded = torch.nn.functional.pad(mask != 0, (1, 0), value=True)  # column 0 stands for none
    return (padded * positions).argmax(1) - 1


def split_at_response(mask: Tensor, responses: Tensor) -> tuple[Tensor, Tensor]:
    """The prompt part [B, P] and the response part [B, T] of a mask [B, P + T]."""
    width = mask.shape[1] - responses.shape[1]
    return mask[:, :width], mask[:, width:]
