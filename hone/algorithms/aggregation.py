"""Aggregates per-token losses to a scalar that does not depend on the split into micro-batches.

The shares of all micro-batches and ranks sum to the loss of the mini-batch: the divisors are counts of the
whole mini-batch, which the engine sets with `batch_counts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.config.actor import current_batch_info
from hone.ops.statistics import masked_mean, masked_sum, zero_outside_mask

LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


@dataclass(frozen=True)
class BatchCounts:
    """Counts of one mini-batch, summed over all micro-batches and ranks."""

    tokens: float
    """Number of tokens in the loss mask."""
    sequences: float
    """Number of rows with at least one token in the loss mask."""
    width: float | None = None
    """The maximum response length: the divisor of `seq-mean-token-sum-norm` if the config has no
    `loss_scale_factor`. None uses the mask's width, which depends on padding."""

    @classmethod
    def from_mask(cls, loss_mask: Tensor, width: float | None = None) -> BatchCounts:
        """Returns the counts of one mask."""
        mask = loss_mask.bool()
        return cls(float(mask.sum()), float(mask.any(dim=-1).sum()), width)


_counts: ContextVar[BatchCounts | None] = ContextVar("hone_batch_counts", default=None)


@contextmanager
def batch_counts(counts: BatchCounts) -> Iterator[None]:
    """Sets the counts that `agg_loss` divides by and that `config.global_batch_info` returns."""
    counts_token = _counts.set(counts)
    info_token = current_batch_info.set(
        {"batch_num_tokens": counts.tokens, "global_batch_size": counts.sequences}
    )
    try:
        yield
    finally:
        current_batch_info.reset(info_token)
        _counts.reset(counts_token)


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Returns this micro-batch's share of the mini-batch loss, times `dp_size`; 0 for an empty mask.

    `dp_size` is for engines that average gradients over ranks. Counts come from the arguments, else from
    `batch_counts`, else from `loss_mask`, which must then be the mask of the whole mini-batch.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ValueError(
            f"loss_agg_mode={loss_agg_mode!r} is unknown; use one of {', '.join(LOSS_AGG_MODES)}"
        )
    if loss_mask.is_floating_point() and not ((loss_mask == 0) | (loss_mask == 1)).all():
        raise ValueError(
            "agg_loss: loss_mask has values other than 0 and 1; multiply weights into loss_mat instead"
        )
    counts = _counts.get()
    if loss_agg_mode == "token-sum":
        return masked_sum(loss_mat, loss_mask) * dp_size
    if loss_agg_mode == "token-mean":
        total = masked_sum(loss_mat, loss_mask)
        tokens = _first_not_none(batch_num_tokens, counts.tokens if counts else None)
        divisor = _divisor(tokens, loss_mask.bool().sum(), dp_size, "batch_num_tokens")
        return total / divisor * dp_size

    reduce_row = masked_mean if loss_agg_mode == "seq-mean-token-mean" else masked_sum
    total = reduce_row(loss_mat, loss_mask, -1).sum()  # a row without tokens adds 0
    rows = _first_not_none(global_batch_size, counts.sequences if counts else None)
    local_rows = loss_mask.bool().any(dim=-1).sum()
    loss = total / _divisor(rows, local_rows, dp_size, "global_batch_size") * dp_size
    if loss_agg_mode == "seq-mean-token-sum-norm":
        width = _first_not_none(loss_scale_factor, counts.width if counts else None)
        width = max(loss_mask.shape[-1], 1) if width is None else width
        if not width > 0:
            raise ValueError(f"loss_scale_factor={width} divides the loss and must be above 0")
        loss = loss / width
    return loss


def _first_not_none(*values: float | Tensor | None) -> float | Tensor | None:
    """Returns the first value that is not None."""
    return next((value for value in values if value is not None), None)


def _divisor(
    count: float | Tensor | None, local_count: Tensor, dp_size: int, name: str
) -> float | Tensor:
    """Returns `count`, or `local_count` if `count` is None; at least 1."""
    if count is None:
        if dp_size > 1:
            raise ValueError(
                f"agg_loss got dp_size={dp_size} but no {name}, and this rank's mask is not the whole "
                f"mini-batch; pass {name}, or call agg_loss inside `batch_counts(BatchCounts(...))`"
            )
        count = local_count
    return torch.clamp(count, min=1) if isinstance(count, Tensor) else max(float(count), 1.0)


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the critic's loss ½·max((v−R)², (clip(v, V±c)−R)²), aggregated, and the clip fraction.

    v is `vpreds`, V `values` (before the update), R `returns`, and c `cliprange_value`.
    """
    vpreds, returns, values = (
        zero_outside_mask(x, response_mask) for x in (vpreds, returns, values)
    )
    clipped_vpreds = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    error = (vpreds - returns) ** 2
    clipped_error = (clipped_vpreds - returns) ** 2
    loss = agg_loss(
        0.5 * torch.maximum(error, clipped_error),
        response_mask,
        loss_agg_mode,
        dp_size,
        batch_num_tokens,
        global_batch_size,
        loss_scale_factor,
    )
    clipfrac = masked_mean((clipped_error > error).to(error.dtype), response_mask)
    return loss, clipfrac.detach()
