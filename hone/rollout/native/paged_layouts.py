"""Layouts over the paged cache, for prefill, for decoding and for exact mode.

A layout is the attention metadata of one forward pass (docs/glossary.md). `PagedPrefill` and `PagedDecode`
first write the new keys and values into the cache. Hugging Face models call `attend`; the fused decoder calls
`attend_qkv` with queries, keys and values as one tensor before the rotation. `ExactLayout` describes
decoding, prefill and training by the block table and the position of every query, so one kernel computes all
of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from hone.ops.attention import (
    AttentionOptions,
    as_bias,
    fits_varlen,
    is_visible,
    padded_attention,
    repeat_heads,
    varlen_attention,
)
from hone.ops.rows import PackedRows
from hone.protocol.rows import to_device
from hone.rollout.native.decode_step import BatchState
from hone.rollout.native.kernels_reference import RotaryTable
from hone.rollout.native.paged_cache import PagedCache

_FULL_GPU_PROGRAMS = 512
"""Number of programs that occupy a large GPU. A batch with fewer programs splits the keys of each row."""
_MAX_SPLITS = 16


class PagedPrefill:
    """The layout of `lengths[i]` new tokens per sequence i, which follow `starts[i]` cached tokens."""

    def __init__(
        self,
        cache: PagedCache,
        kernels: ModuleType,
        blocks: list[list[int]],
        starts: list[int],
        lengths: list[int],
        device: torch.device,
    ) -> None:
        self._cache, self._kernels = cache, kernels
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        slots = []  # of all tokens of each sequence
        for block_ids, end in zip(blocks, ends, strict=True):
            block, offset = np.divmod(np.arange(end), cache.block_size)
            slots.append(np.array(block_ids)[block] * cache.block_size + offset)
        self._position_ranges = list(zip(starts, ends, strict=True))
        self.positions = _concat([np.arange(*span) for span in self._position_ranges], device)
        new_slots = [all_slots[start:] for all_slots, start in zip(slots, starts, strict=True)]
        self.slots = _concat(new_slots, device)
        self._key_slots = _concat(slots, device) if any(starts) else None
        self._max_lengths = max(lengths), max(ends)
        self._cu_q, self._cu_k = (
            to_device(
                torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32), device
            )
            for counts in (lengths, ends)
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        self._cache.check_shape(k, v)
        self._kernels.store_kv(k, v, self.slots, self._cache, options.layer)
        return self._attend(q, k, v, options)

    def attend_qkv(self, qkv: Tensor, rotary: RotaryTable, options: AttentionOptions) -> Tensor:
        q, k, v = self._kernels.rope_store(
            qkv, rotary, self.positions, self.slots, self._cache, options.layer, return_keys=True
        )
        return self._attend(q, k, v, options)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        if self._key_slots is not None:  # prefix-cache hits: read all keys from the cache
            block_size = self._cache.block_size
            block, offset = self._key_slots // block_size, self._key_slots % block_size
            k, v = (tensor[block, :, offset] for tensor in self._cache.layer(options.layer))
        if fits_varlen(q) and not options.needs_scores:
            scaling, window = options.scaling, options.window
            return varlen_attention(
                q, k, v, self._cu_q, self._cu_k, *self._max_lengths, scaling=scaling, window=window
            )
        k, v = repeat_heads(q, k, v)
        out = torch.empty_like(q)
        begin_q = begin_k = 0
        for start, end in self._position_ranges:
            q_slice = slice(begin_q, begin_q + end - start)
            k_slice = slice(begin_k, begin_k + end)
            position = torch.arange(end, device=q.device)
            visible = is_visible(position[start:, None] - position, options.window)
            queries, keys, values = (
                x.transpose(0, 1)[None] for x in (q[q_slice], k[k_slice], v[k_slice])
            )
            attention_out = padded_attention(
                queries, keys, values, as_bias(visible, q.dtype), options
            )
            out[q_slice] = attention_out[0].transpose(0, 1)
            begin_q, begin_k = q_slice.stop, k_slice.stop
        return out


def _concat(arrays: list[np.ndarray], device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(np.concatenate(arrays)), device)


class PagedDecode:
    """The layout of one new token per row of a batch; small batches split the keys of a row."""

    def __init__(self, cache: PagedCache, kernels: ModuleType, batch: BatchState) -> None:
        self._cache, self._kernels = cache, kernels
        self._block_table, self._positions = batch.block_table, batch.position
        self.slots = batch.slot
        # The kernel that combines the splits expects a power of two.
        splits_to_fill = _FULL_GPU_PROGRAMS // max(batch.num_rows * cache.kv_heads, 1)
        self._splits = min(_MAX_SPLITS, 1 << max(0, int(math.log2(max(splits_to_fill, 1)))))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        self._cache.check_shape(k, v)
        self._kernels.store_kv(k, v, self.slots, self._cache, options.layer)
        return self._kernels.decode_attention(
            q, self._cache, self._block_table, self._positions, options, splits=self._splits
        )

    def attend_qkv(self, qkv: Tensor, rotary: RotaryTable, options: AttentionOptions) -> Tensor:
        return self._kernels.rope_attention(
            qkv,
            rotary,
            self._positions,
            self.slots,
            self._cache,
            self._block_table,
            options,
            splits=self._splits,
        )


TILE_ROWS = 64
"""Rows per program of the GPU kernel, each a pair of query and head; results depend on this number."""


@dataclass(frozen=True)
class Tiles:
    """The T tiles of the GPU kernel, each with consecutive queries of one sequence; fields are [T] int64."""

    first_query: Tensor  # index of the first query
    num_queries: Tensor
    first_position: Tensor  # position of the first query in the sequence
    row: Tensor  # row of the block table


@dataclass(frozen=True)
class Queries:
    """The sequence and position of every query; a query attends to all keys up to its position."""

    position: Tensor  # [N] int64
    row: Tensor  # [N] int64, row of the block table
    block_table: Tensor  # [R, W] int32, the blocks of each row
    tiles: Tiles | None
    """Only the GPU kernel uses the tiles."""


def queries_per_tile(heads: int, kv_heads: int) -> int:
    """Returns the number of queries per tile, each with all query heads of one key head."""
    group = heads // kv_heads
    if group > TILE_ROWS:
        raise ValueError(
            f"exact attention supports {TILE_ROWS} query heads per key head; the model has {group}"
        )
    return TILE_ROWS // (1 << (group - 1).bit_length())


def decode_queries(block_table: Tensor, positions: Tensor) -> Queries:
    """Returns the queries of a decode step, one per row."""
    row = torch.arange(len(positions), device=positions.device)
    return Queries(positions, row, block_table, Tiles(row, torch.ones_like(row), positions, row))


def segment_queries(
    starts: list[int],
    ends: list[int],
    blocks: list[list[int]],
    queries_per_tile: int,
    device: torch.device,
) -> Queries:
    """Returns the queries of segments; segment i has positions [starts[i], ends[i]) of row i."""
    lengths = np.array(ends) - np.array(starts)
    first_query = np.cumsum(lengths) - lengths
    position = np.concatenate(
        [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
    )
    padded_table = np.zeros((len(blocks), max(map(len, blocks))), np.int32)
    for row, block_ids in enumerate(blocks):
        padded_table[row, : len(block_ids)] = block_ids
    offsets = [np.arange(0, length, queries_per_tile) for length in lengths]
    # For each tile: its segment, and its offset in that segment.
    segment = np.repeat(np.arange(len(offsets)), [len(tile_offsets) for tile_offsets in offsets])
    offset = np.concatenate(offsets)
    num_queries = np.minimum(lengths[segment] - offset, queries_per_tile)
    tile_arrays = (
        first_query[segment] + offset,
        num_queries,
        np.array(starts)[segment] + offset,
        segment,
    )

    def array_to_device(values: np.ndarray, dtype: type[np.integer] = np.int64) -> Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(values, dtype)), device)

    rows = np.repeat(np.arange(len(lengths)), lengths)
    block_table = array_to_device(padded_table, np.int32)
    return Queries(
        array_to_device(position),
        array_to_device(rows),
        block_table,
        Tiles(*map(array_to_device, tile_arrays)),
    )


class ExactLayout:
    """The layout of exact mode: the queries of one forward pass, and the slots of its new keys."""

    def __init__(
        self, cache: PagedCache, kernels: ModuleType, queries: Queries, slots: Tensor | None = None
    ) -> None:
        """`slots` has the slot of each new key; None computes the slots from the positions of the queries."""
        self.cache, self._kernels, self._queries = cache, kernels, queries
        self.positions = queries.position
        if slots is None:
            block = queries.block_table[queries.row, self.positions // cache.block_size].long()
            slots = block * cache.block_size + self.positions % cache.block_size
        self.slots = slots

    def cache_layer(self, layer: int) -> int:
        """Returns the layer of the cache that a layer of the model writes and reads."""
        return layer

    def attend(self, q: Tensor, *, layer: int, scaling: float) -> Tensor:
        return self._kernels.query_attention(
            q, self.cache, self.cache_layer(layer), self._queries, scaling=scaling
        )


class TrainingLayout(ExactLayout):
    """The layout of packed training rows, over a one-layer cache that every layer overwrites.

    Every packed prompt and response is a segment with a row of the block table; a response shares the full
    blocks of its prompt.
    """

    def __init__(
        self, packed: PackedRows, kernels: ModuleType, *, kv_heads: int, head_dim: int,
        block_size: int, queries_per_tile: int, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        device, prompt_lengths = packed.input_ids.device, packed.layout.root_lengths
        parents: list[int | None] = [None] * len(prompt_lengths)
        starts, ends = [0] * len(prompt_lengths), list(prompt_lengths)
        for prompt, length in packed.layout.children:
            parents.append(prompt)
            starts.append(prompt_lengths[prompt])
            ends.append(prompt_lengths[prompt] + length)
        num_blocks = 1  # block 0 is the null block
        blocks: list[list[int]] = []
        # The tail of a prompt is copied to the start of each response's first block.
        sources, targets = [np.empty(0, np.int64)], [np.empty(0, np.int64)]  # slots
        for parent, start, end in zip(parents, starts, ends, strict=True):
            full_blocks, tail_tokens = divmod(start, block_size)
            first, num_blocks = num_blocks, num_blocks + -(-end // block_size) - full_blocks
            shared = [] if parent is None else blocks[parent][:full_blocks]
            blocks.append([*shared, *range(first, num_blocks)])
            if parent is not None and tail_tokens and end > start:
                offset = np.arange(tail_tokens)
                sources.append(blocks[parent][full_blocks] * block_size + offset)
                targets.append(first * block_size + offset)
        cache = PagedCache(
            num_layers=1, kv_heads=kv_heads, head_dim=head_dim, num_blocks=num_blocks,
            block_size=block_size, dtype=dtype, device=device,
        )  # fmt: skip
        cache.reserve()
        queries = segment_queries(starts, ends, blocks, queries_per_tile, device)
        super().__init__(cache, kernels, queries)
        self._sources, self._targets = _concat(sources, device), _concat(targets, device)

    def cache_layer(self, layer: int) -> int:
        return 0

    def attend(self, q: Tensor, *, layer: int, scaling: float) -> Tensor:
        size, source, target = self.cache.block_size, self._sources, self._targets
        if len(source):  # the first block of a response begins with the tail of its prompt
            for tensor in self.cache.layer(0):
                tensor[target // size, :, target % size] = tensor[source // size, :, source % size]
        return super().attend(q, layer=layer, scaling=scaling)
