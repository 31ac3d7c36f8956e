"""Rows of a batch: masked statistics, statistics over groups of rows, micro-batches and packed rows.

Masked entries, even NaN or infinity, change neither values nor gradients: they are replaced by 0 before any
arithmetic. A group is the rows with equal labels, such as the responses to one prompt.

Packed rows are concatenated without padding. If several rows share a prompt, it is packed once as a root
segment, and their responses are its children. Only tokens that predict a response token have a target.

In shapes, N is the number of packed tokens, M of targets, B of rows and G of groups; P and T are the padded
widths of prompts and responses.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hone.ops.attention import SegmentLayout
from hone.protocol.rows import to_device

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
    count = count_unmasked(mask.expand_as(values), axis)
    return masked_sum(values, mask, axis) / count.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Returns the variance of the unmasked entries; 0 for fewer than two."""
    mean = masked_mean(values, mask)
    count = count_unmasked(mask.expand_as(values))
    squared_deviations = masked_sum((zero_outside_mask(values, mask) - mean) ** 2, mask)
    return squared_deviations / (count - 1 if unbiased else count).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scales unmasked entries to variance 1 and, with `shift_mean`, mean 0; masked entries become 0."""
    mean = masked_mean(values, mask)
    inverse_std = torch.rsqrt(masked_var(values, mask) + WHITEN_EPS)
    whitened = (zero_outside_mask(values, mask) - mean) * inverse_std
    return zero_outside_mask(whitened if shift_mean else whitened + mean, mask)


def last_true_index(mask: Tensor) -> Tensor:
    """Returns [B]: the index of the last nonzero entry in each row of a mask [B, T], -1 if all are 0."""
    positions = torch.arange(mask.shape[1] + 1, device=mask.device)
    padded = torch.nn.functional.pad(mask != 0, (1, 0), value=True)  # column 0 means "all are 0"
    return (padded * positions).argmax(1) - 1


def split_at_response(mask: Tensor, responses: Tensor) -> tuple[Tensor, Tensor]:
    """Splits a mask [B, P + T] into the masks of prompts [B, P] and responses [B, T]."""
    prompt_length = mask.shape[1] - responses.shape[1]
    return mask[:, :prompt_length], mask[:, prompt_length:]


Labels = Sequence[Hashable] | np.ndarray | Tensor
"""One value per row, equal for the rows of a group."""


def factorise(labels: Labels) -> np.ndarray:
    """Returns an integer id per row; equal labels have equal ids, from 0 to G - 1."""
    if isinstance(labels, Tensor):
        labels = labels.cpu().numpy()
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "iufb":
        return np.unique(labels, return_inverse=True)[1].astype(np.int64).reshape(-1)
    # np.unique would sort the labels, which may have no order ("a" < 3 raises).
    ids: dict[Hashable, int] = {}
    return np.array([ids.setdefault(label, len(ids)) for label in labels], np.int64)


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
    """The group of each row; statistics have one float64 value per group."""

    ids: Tensor  # [B] int64, from 0 to G - 1
    sizes: Tensor  # [G] float64, number of rows

    @classmethod
    def of(cls, labels: Labels, device: torch.device | None = None) -> Groups:
        """Groups the rows that have equal labels."""
        ids = torch.from_numpy(factorise(labels)).to(device)
        return cls(ids, torch.bincount(ids).double())

    @property
    def count(self) -> int:
        return len(self.sizes)

    @property
    def is_singleton(self) -> Tensor:
        """Whether each row is alone in its group, [B] bool."""
        return (self.sizes == 1)[self.ids]

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum per group, [B, ...] → [G, ...]."""
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
        extremes = torch.zeros(self.count, dtype=torch.float64, device=x.device)
        return extremes.scatter_reduce_(0, self.ids, x.double(), reduce, include_self=False)


@dataclass(frozen=True)
class MicroBatchRule:
    """The maximum size of a micro-batch: `rows` rows or, if `rows` is None, `tokens` tokens.

    A prompt that several rows of a micro-batch share is counted once.
    """

    rows: int | None
    tokens: int
    rows_per_unit: int = 1
    """Number of consecutive rows that must stay together, such as 2 for the pairs of a reward model."""

    def split(
        self,
        lengths: Sequence[int],
        shared_lengths: Sequence[int] | None = None,
        *,
        min_micro_batches: int = 1,
    ) -> list[list[int]]:
        """Returns the row indices of at least `min_micro_batches` micro-batches; some may be empty.

        `shared_lengths` holds the number of tokens that each row shares with the previous row.
        """
        shared_lengths = shared_lengths or [0] * len(lengths)
        if self.rows_per_unit > 1:
            return self._split_units(lengths, shared_lengths, min_micro_batches)
        if self.rows is not None:
            indices = list(range(len(lengths)))
            micro_batches = [
                indices[start : start + self.rows] for start in range(0, len(indices), self.rows)
            ]
        else:
            micro_batches = self._split_by_tokens(lengths, shared_lengths)
        micro_batches = micro_batches or [[]]
        while len(micro_batches) < min_micro_batches:
            largest = max(micro_batches, key=len)
            position, middle = micro_batches.index(largest), (len(largest) + 1) // 2
            micro_batches[position : position + 1] = [largest[:middle], largest[middle:]]
        return micro_batches

    def _split_units(
        self, lengths: Sequence[int], shared_lengths: Sequence[int], min_micro_batches: int
    ) -> list[list[int]]:
        """Splits the units as `split` splits rows, then lists the rows of each unit."""
        size = self.rows_per_unit
        unshared_lengths = [n - s for n, s in zip(lengths, shared_lengths, strict=True)]
        unit_lengths = [
            lengths[start] + sum(unshared_lengths[start + 1 : start + size])
            for start in range(0, len(lengths), size)
        ]
        max_units = None if self.rows is None else max(1, self.rows // size)
        rule = MicroBatchRule(max_units, self.tokens)
        unit_lists = rule.split(unit_lengths, min_micro_batches=min_micro_batches)
        return [[unit * size + k for unit in units for k in range(size)] for units in unit_lists]

    def _split_by_tokens(
        self, lengths: Sequence[int], shared_lengths: Sequence[int]
    ) -> list[list[int]]:
        """Fills each micro-batch with consecutive rows up to the token budget."""
        micro_batches: list[list[int]] = []
        tokens_left = 0
        for row, (length, shared) in enumerate(zip(lengths, shared_lengths, strict=True)):
            if length > self.tokens:
                raise ValueError(
                    f"a row has {length} tokens, more than the budget of {self.tokens} for one forward; "
                    f"set ppo_max_token_len_per_gpu to at least {length}"
                )
            if micro_batches and length - shared <= tokens_left:
                tokens_left -= length - shared
            else:
                micro_batches.append([])
                tokens_left = self.tokens - length
            micro_batches[-1].append(row)
        return micro_batches


@dataclass(frozen=True)
class PackedRows:
    """Rows of tokens without padding, and the position of each target in the padded batch."""

    input_ids: Tensor  # [N] int64
    position_ids: Tensor  # [N] int64
    layout: SegmentLayout
    predicting_position: Tensor  # [M] packed position whose hidden state predicts the target
    target: Tensor  # [M] response token id
    row: Tensor  # [M] row of the padded batch
    response_position: Tensor  # [M] position in the padded response
    shape: tuple[int, int]  # (B, T) of the padded responses
    packed_positions: Tensor | None = field(default=None, kw_only=True)
    """The packed position [B, P + T] of each token of the padded batch, -1 if it is not packed."""
    experts: Tensor | None = field(default=None, kw_only=True)
    """The experts [N, layers, k] to replay, -1 where none were recorded."""

    def with_experts(self, experts: Tensor) -> PackedRows:
        """Returns these rows with the experts to replay, packed from [B, P + T, layers, k]."""
        assert self.packed_positions is not None
        is_packed = self.packed_positions >= 0
        packed_experts = experts.new_full((len(self.input_ids), *experts.shape[2:]), -1)
        packed_experts[self.packed_positions[is_packed]] = experts[is_packed]
        return replace(self, experts=packed_experts)

    def pad(self, values: Tensor, padding: float) -> Tensor:
        """Converts values [N, …] of packed tokens to [B, P + T, …], with `padding` elsewhere."""
        assert self.packed_positions is not None
        padded_values = values[self.packed_positions.clamp(min=0)]
        padded_values[self.packed_positions < 0] = padding
        return padded_values

    def unpack(self, values: Tensor) -> Tensor:
        """Converts values [M] of targets to [B, T], with zeros outside the response mask."""
        zeros = values.new_zeros(self.shape)
        return zeros.index_put((self.row, self.response_position), values)

    def to(self, device: torch.device) -> PackedRows:
        tensors: dict[str, Any] = {
            name: to_device(value, device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, layout=self.layout.to(device), **tensors)


def pack_rows(
    prompts: Tensor,  # [B, P] left-padded
    responses: Tensor,  # [B, T] right-padded
    attention_mask: Tensor,  # [B, P + T]
    response_mask: Tensor,  # [B, T]
    *,
    share_prompts: bool,
    with_packed_positions: bool = False,
) -> PackedRows:
    """Packs the rows of a padded batch; with `share_prompts`, equal prompts are packed once."""
    num_rows, prompt_width = prompts.shape
    masks = split_at_response(attention_mask, responses)
    prompt_lengths, response_lengths = (mask.sum(1).tolist() for mask in masks)
    if any(length == 0 for length in prompt_lengths):
        raise ValueError("a row has an empty prompt, so no token predicts its response")
    prompt_ids, response_ids = prompts.cpu().numpy(), responses.cpu().numpy()
    unpadded_rows = [
        (
            prompt_ids[i, prompt_width - prompt_lengths[i] :],
            # The last response token predicts no target, so it is not packed.
            response_ids[i, : max(response_lengths[i] - 1, 0)],
        )
        for i in range(num_rows)
    ]
    first_rows = first_equal_indices([prompt.tobytes() for prompt, _ in unpadded_rows])
    # If no prompt is shared, each row is one causal segment, which is cheaper than two segments.
    is_shared = share_prompts and len(set(first_rows)) < num_rows
    packed = _pack_shared(unpadded_rows, first_rows) if is_shared else _pack_whole(unpadded_rows)
    row, response_position = (index.cpu() for index in response_mask.nonzero(as_tuple=True))
    i, j = row.numpy(), response_position.numpy()
    # A response token is predicted by the token before it; the first one, by the last prompt token.
    predicting_position = np.where(j == 0, packed.prompt_last[i], packed.response_start[i] + j - 1)
    packed_positions = None
    if with_packed_positions:
        packed_positions = _packed_positions(masks, packed.prompt_last, packed.response_start)
    return PackedRows(
        torch.from_numpy(packed.ids),
        torch.from_numpy(packed.positions),
        packed.layout,
        torch.from_numpy(predicting_position),
        torch.from_numpy(response_ids[i, j]),
        row,
        response_position,
        (num_rows, responses.shape[1]),
        packed_positions=packed_positions,
    )


def _packed_positions(
    masks: tuple[Tensor, Tensor], prompt_last: np.ndarray, response_start: np.ndarray
) -> Tensor:  # [B, P + T]
    """Returns the packed position of each token of the padded batch, -1 if it is not packed."""
    in_prompt, in_response = (mask.cpu().bool().numpy() for mask in masks)
    prompt_width, response_width = in_prompt.shape[1], in_response.shape[1]
    prompt_positions = prompt_last[:, None] - np.arange(prompt_width)[::-1]
    response_positions = response_start[:, None] + np.arange(response_width)
    is_packed = np.arange(response_width) < in_response.sum(1, keepdims=True) - 1
    prompt_positions = np.where(in_prompt, prompt_positions, -1)
    response_positions = np.where(is_packed, response_positions, -1)
    return torch.from_numpy(np.concatenate([prompt_positions, response_positions], 1))


def shared_prompt_lengths(prompts: Tensor, attention_mask: Tensor) -> list[int]:
    """Returns, per row, the prompt length if the previous row has the same prompt, else 0."""
    width = prompts.shape[1]
    mask = attention_mask[:, :width]
    is_same = (prompts[1:] == prompts[:-1]).all(1) & (mask[1:] == mask[:-1]).all(1)
    return [0, *(mask[1:].sum(1) * is_same).tolist()][: len(prompts)]


class _PackedTokens(NamedTuple):
    ids: np.ndarray  # [N]
    positions: np.ndarray  # [N] position of each token in its row
    layout: SegmentLayout
    prompt_last: np.ndarray  # [B] packed position of each row's last prompt token
    response_start: np.ndarray  # [B] packed position of each row's first response token


_UnpaddedRows = list[tuple[np.ndarray, np.ndarray]]
"""The token ids of each row's prompt and response."""


def _pack_whole(rows: _UnpaddedRows) -> _PackedTokens:
    """Packs the prompt and the response of each row as one root segment."""
    prompt_lengths = np.array([len(prompt) for prompt, _ in rows])
    lengths = prompt_lengths + np.array([len(response) for _, response in rows])
    response_start = np.cumsum(lengths) - lengths + prompt_lengths
    ids = np.concatenate([token_ids for row in rows for token_ids in row])
    positions = np.concatenate([np.arange(n) for n in lengths])
    layout = SegmentLayout(lengths.tolist(), [])
    return _PackedTokens(ids, positions, layout, response_start - 1, response_start)


def _pack_shared(rows: _UnpaddedRows, first_rows: list[int]) -> _PackedTokens:
    """Packs each distinct prompt as a root segment and each response as a child of its prompt.

    `first_rows` holds, for each row, the index of the first row with the same prompt.
    """
    prompt_rows = sorted(set(first_rows))
    root_of_row = {row: i for i, row in enumerate(prompt_rows)}
    roots = np.array([root_of_row[row] for row in first_rows])  # of each child
    prompts = [rows[row][0] for row in prompt_rows]
    responses = [response for _, response in rows]
    root_lengths = np.array([len(prompt) for prompt in prompts])
    child_lengths = np.array([len(response) for response in responses])
    root_positions = [np.arange(n) for n in root_lengths]
    child_positions = [
        root_lengths[root] + np.arange(n) for root, n in zip(roots, child_lengths, strict=True)
    ]
    children = list(zip(roots.tolist(), child_lengths.tolist(), strict=True))
    root_end = np.cumsum(root_lengths)
    return _PackedTokens(
        np.concatenate([*prompts, *responses]),
        np.concatenate([*root_positions, *child_positions]),
        SegmentLayout(root_lengths.tolist(), children),
        root_end[roots] - 1,
        root_end[-1] + np.cumsum(child_lengths) - child_lengths,
    )
