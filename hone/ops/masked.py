"""Statistics over the unmasked entries of a tensor.

Masked entries, even NaN or infinity, change neither values nor gradients: they are replaced by 0 before any
arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

WHITEN_EPS = 1e-8


def zero_outside_mask(x: Tensor, mask: Tensor) -> Tensor:
    """Returns `x` where the mask is set, 0 elsewhere."""
    return torch.where(mask.bool(), x, 0)


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Returns the sum of the unmasked entries."""
    values = zero_outside_mask(values, mask)
    return values.sum() if axis is None else values.sum(dim=axis)


def count_unmasked(mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Returns the integer number of unmasked entries."""
    ones = mask.bool().view(torch.uint8)  # bytes are summed many times faster than bools
    if axis is None:
        return ones.flatten().sum()
    return ones.sum(dim=axis, dtype=torch.int32)  # faster than int64


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Returns the mean of the unmasked entries; 0 if there are none."""
    return masked_sum(values, mask, axis) / count_unmasked(mask.expand_as(values), axis).clamp(
        min=1
    )


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Returns the variance of the unmasked entries; 0 for fewer than two."""
    mean = masked_mean(values, mask)
    count = count_unmasked(mask.expand_as(values))
    squared_deviations = masked_sum((zero_outside_mask(values, mask) - mean) ** 2, mask)
    return squared_deviations / (count - 1 if unbiased else count).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scales unmasked entries to variance 1 and, with `shift_mean`, mean 0; masked ones are 0."""
    mean = masked_mean(values, mask)
    whitened = (zero_outside_mask(values, mask) - mean) * torch.rsqrt(
        masked_var(values, mask) + WHITEN_EPS
    )
    return zero_outside_mask(whitened if shift_mean else whitened + mean, mask)


def last_true_index(mask: Tensor) -> Tensor:
    """Returns [B]: the index of the last nonzero entry in each row of a mask [B, T], -1 if all are 0."""
    positions = torch.arange(mask.shape[1] + 1, device=mask.device)
    padded = torch.nn.functional.pad(mask != 0, (1, 0), value=True)  # index 0 stands for "none"
    return (padded * positions).argmax(1) - 1


def split_at_response(mask: Tensor, responses: Tensor) -> tuple[Tensor, Tensor]:
    """Splits a mask [B, P + T] into the masks of prompts [B, P] and responses [B, T]."""
    prompt_length = mask.shape[1] - responses.shape[1]
    return mask[:, :prompt_length], mask[:, prompt_length:]
