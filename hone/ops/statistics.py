"""Statistics over the unmasked entries of a tensor and over groups of rows, and the aggregation of losses.

Masked entries, even NaN or infinity, change neither values nor gradients: they are replaced by 0 before any
arithmetic. The labels of groups, such as the prompts of responses, may be any hashable values. They are
converted to integers once; the statistics are scatter operations, without loops over rows or groups.

`agg_loss` aggregates per-token losses to a scalar that does not depend on the split into micro-batches: the
divisors are counts of the whole mini-batch, which the engine sets with `batch_counts`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hone.config.actor import current_batch_info

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


Labels = Sequence[Hashable] | np.ndarray | Tensor
"""One value per row, equal for the rows of a group."""


def factorise(labels: Labels) -> np.ndarray:
    """Returns an integer id per row; equal labels have equal ids, from 0 to n - 1."""
    if isinstance(labels, Tensor):
        labels = labels.cpu().numpy()
    array = labels if isinstance(labels, np.ndarray) else None
    if array is not None and array.dtype.kind in "iufb":
        return np.unique(array, return_inverse=True)[1].astype(np.int64).reshape(-1)
    # np.unique would sort the labels, which may have no order ("a" < 3 raises).
    ids: dict[Hashable, int] = {}
    return np.fromiter((ids.setdefault(x, len(ids)) for x in labels), np.int64, len(labels))


def first_equal_indices(items: Sequence[Hashable]) -> list[int]:
    """Returns for each item the index of the first item that is equal to it."""
    first: dict[Hashable, int] = {}
    return [first.setdefault(item, i) for i, item in enumerate(items)]


def factorise_pairs(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns an integer id per pair (a[i], b[i]), and the first row of each id."""
    _, first, ids = np.unique(np.stack([a, b]), axis=1, return_index=True, return_inverse=True)
    return ids.reshape(-1).astype(np.int64), first


@dataclass(frozen=True)
class Groups:
    """The group id of each of N rows; statistics are float64, one value per group."""

    ids: Tensor  # [N] int64
    sizes: Tensor  # [G] float64

    @classmethod
    def of(cls, labels: Labels, device: torch.device | None = None) -> Groups:
        ids = torch.from_numpy(factorise(labels)).to(device)
        return cls(ids, torch.bincount(ids).double())

    @property
    def count(self) -> int:
        return len(self.sizes)

    @property
    def is_singleton(self) -> Tensor:
        """Whether each row is alone in its group, [N] bool."""
        return (self.sizes == 1)[self.ids]

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum per group, [N, ...] → [G, ...]."""
        x = x.double()
        return x.new_zeros((self.count, *x.shape[1:])).index_add_(0, self.ids, x)

    def max(self, x: Tensor) -> Tensor:
        return self._extreme(x, "amax")

    def min(self, x: Tensor) -> Tensor:
        return self._extreme(x, "amin")

    def mean(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Returns the (weighted) mean per group; it is exact if all values of a group are equal."""
        group_max = self.max(x)
        deviation = x.double() - group_max[self.ids]
        if weights is None:
            return group_max + self.sum(deviation) / self.sizes
        return group_max + self.sum(deviation * weights) / self.sum(weights).clamp(min=1)

    def std(self, x: Tensor) -> Tensor:
        """Returns the unbiased standard deviation per group; 0 for a group of one row."""
        squared_deviations = self.sum((x.double() - self.mean(x)[self.ids]) ** 2)
        return torch.sqrt(squared_deviations / (self.sizes - 1).clamp(min=1))

    def _extreme(self, x: Tensor, reduce: str) -> Tensor:
        out = torch.zeros(self.count, dtype=torch.float64, device=x.device)
        return out.scatter_reduce_(0, self.ids, x.double(), reduce, include_self=False)


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
