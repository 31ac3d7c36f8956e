"""Attention layouts of exact mode: the block table and the position of every query.

Decoding, prefill and training share these layouts, so one kernel computes all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from hone.ops.device import send
from hone.ops.packing import PackedRows
from hone.rollout.native.paged_cache import PagedCache

TILE_ROWS = 64
"""Rows (pairs of query and head) per program of the GPU kernel; results depend on this number."""


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
    offsets = [np.arange(0, n, queries_per_tile) for n in lengths]
    # For each tile: its segment, and its offset in that segment.
    segment = np.repeat(np.arange(len(offsets)), [len(o) for o in offsets])
    offset = np.concatenate(offsets)
    num_queries = np.minimum(lengths[segment] - offset, queries_per_tile)
    tile_arrays = (
        first_query[segment] + offset,
        num_queries,
        np.array(starts)[segment] + offset,
        segment,
    )

    def to_device(values: np.ndarray, dtype: type[np.integer] = np.int64) -> Tensor:
        return send(torch.from_numpy(np.ascontiguousarray(values, dtype)), device)

    rows = np.repeat(np.arange(len(lengths)), lengths)
    block_table = to_device(padded_table, np.int32)
    return Queries(
        to_device(position), to_device(rows), block_table, Tiles(*map(to_device, tile_arrays))
    )


class ExactLayout:
    """The attention layout of one forward: the slots of its new keys, and its queries."""

    def __init__(
        self, cache: PagedCache, kernels: ModuleType, slots: Tensor, queries: Queries
    ) -> None:
        self.cache, self.slots = cache, slots
        self.positions = queries.position
        self._queries, self._kernels = queries, kernels

    def cache_layer(self, layer: int) -> int:
        """Returns the layer of the cache that a layer of the model writes and reads."""
        return layer

    def attend(self, q: Tensor, *, layer: int, scaling: float) -> Tensor:
        return self._kernels.query_attention(
            q, self.cache, self.cache_layer(layer), self._queries, scaling=scaling
        )


class TrainingLayout(ExactLayout):
    """The layout of packed training rows, over a one-layer cache that every layer overwrites."""

    def __init__(
        self, packed: PackedRows, kernels: ModuleType, *, kv_heads: int, head_dim: int,
        block_size: int, queries_per_tile: int, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        device = packed.input_ids.device
        segments = _Segments(packed, block_size)
        cache = PagedCache(
            num_layers=1, kv_heads=kv_heads, head_dim=head_dim, num_blocks=segments.num_blocks,
            block_size=block_size, dtype=dtype, device=device,
        )  # fmt: skip
        cache.reserve()
        queries = segment_queries(
            segments.starts, segments.ends, segments.blocks, queries_per_tile, device
        )
        slots, source_slots, target_slots = (
            send(torch.from_numpy(np.concatenate(arrays)), device)
            for arrays in (segments.slots, segments.source_slots, segments.target_slots)
        )
        super().__init__(cache, kernels, slots, queries)
        self._source_slots, self._target_slots = source_slots, target_slots

    def cache_layer(self, layer: int) -> int:
        return 0

    def attend(self, q: Tensor, *, layer: int, scaling: float) -> Tensor:
        if len(self._source_slots):  # a response's first block begins with the tail of its prompt
            size = self.cache.block_size
            for tensor in self.cache.layer(0):
                tensor[self._target_slots // size, :, self._target_slots % size] = tensor[
                    self._source_slots // size, :, self._source_slots % size
                ]
        return super().attend(q, layer=layer, scaling=scaling)


class _Segments:
    """A segment per packed prompt and response; a response shares its prompt's full blocks."""

    def __init__(self, packed: PackedRows, block_size: int) -> None:
        self._block_size = block_size
        self.num_blocks = 1  # block 0 is the null block
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.blocks: list[list[int]] = []
        self.slots: list[np.ndarray] = []  # slots of each segment's tokens
        # The slots of a prompt's tail are copied to the start of each response's first block.
        self.source_slots, self.target_slots = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        prompt_blocks = [self._add(0, length, []) for length in packed.layout.root_lengths]
        for prompt, response_length in packed.layout.children:
            prompt_length = packed.layout.root_lengths[prompt]
            full_blocks, tail_tokens = divmod(prompt_length, block_size)
            blocks = self._add(
                prompt_length, prompt_length + response_length, prompt_blocks[prompt][:full_blocks]
            )
            if tail_tokens and response_length:
                offset = np.arange(tail_tokens)
                self.source_slots.append(prompt_blocks[prompt][full_blocks] * block_size + offset)
                self.target_slots.append(blocks[full_blocks] * block_size + offset)

    def _add(self, begin: int, end: int, shared_blocks: list[int]) -> list[int]:
        """Adds a segment of positions [begin, end); returns its block table."""
        block_size = self._block_size
        new_blocks = list(
            range(self.num_blocks, self.num_blocks + -(-end // block_size) - begin // block_size)
        )
        self.num_blocks += len(new_blocks)
        blocks = [*shared_blocks, *new_blocks]
        position = np.arange(begin, end)
        self.slots.append(
            np.array(blocks, np.int64)[position // block_size] * block_size + position % block_size
        )
        self.starts.append(begin)
        self.ends.append(end)
        self.blocks.append(blocks or [0])
        return blocks
