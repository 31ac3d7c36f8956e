"""Attention layouts of exact mode: the block table and the position of every query.

Decoding, prefill and training share these layouts, so one kernel computes all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from hone.ops.packing import PackedRows
from hone.ops.transfer import send
from hone.rollout.native.paged_cache import PagedCache

TILE_ROWS = 64
"""Query heads per program of the GPU kernel; constant, because results depend on it."""


@dataclass(frozen=True)
class Tiles:
    """The queries of each program of the GPU kernel, consecutive in one sequence; each [T] int64."""

    token: Tensor  # first query
    count: Tensor
    position: Tensor  # position of the first query
    row: Tensor  # row of the block table


@dataclass(frozen=True)
class Queries:
    """The row and position of every query, which attends to its row up to its position."""

    position: Tensor  # [N] int64
    row: Tensor  # [N] int64
    block_table: Tensor  # [R, W] int32
    tiles: Tiles | None
    """Used by the GPU kernel only."""


def queries_per_tile(heads: int, kv_heads: int) -> int:
    group = heads // kv_heads
    if group > TILE_ROWS:
        raise ValueError(
            f"{group} query heads per key head are more than exact attention's {TILE_ROWS}"
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
    """Returns the queries of consecutive segments; segment i has positions [start, end) of row i."""
    lengths = np.array(ends) - np.array(starts)
    first = np.cumsum(lengths) - lengths
    position = np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)])
    table = np.zeros((len(blocks), max(map(len, blocks))), np.int32)
    for row, ids in enumerate(blocks):
        table[row, : len(ids)] = ids
    offsets = [np.arange(0, n, queries_per_tile) for n in lengths]
    segment = np.repeat(np.arange(len(offsets)), [len(o) for o in offsets])
    offset = np.concatenate(offsets)
    count = np.minimum(lengths[segment] - offset, queries_per_tile)
    tiles = (first[segment] + offset, count, np.array(starts)[segment] + offset, segment)

    def to_device(values: np.ndarray, dtype: type[np.integer] = np.int64) -> Tensor:
        return send(torch.from_numpy(np.ascontiguousarray(values, dtype)), device)

    rows = np.repeat(np.arange(len(lengths)), lengths)
    block_table = to_device(table, np.int32)
    return Queries(to_device(position), to_device(rows), block_table, Tiles(*map(to_device, tiles)))


class ExactLayout:
    """The layout of one forward: the slots of its new keys, and its queries."""

    def __init__(
        self, cache: PagedCache, kernels: ModuleType, slots: Tensor, queries: Queries
    ) -> None:
        self.cache, self.slots = cache, slots
        self.positions = queries.position
        self._queries, self._kernels = queries, kernels

    def cache_layer(self, layer: int) -> int:
        """Returns the cache layer that a model layer writes."""
        return layer

    def attend(self, q: Tensor, *, layer: int, scaling: float) -> Tensor:
        return self._kernels.query_attention(
            q, self.cache, self.cache_layer(layer), self._queries, scaling=scaling
        )


class TrainingLayout(ExactLayout):
    """The layout of packed training rows, over a one-layer cache that every layer overwrites."""

    def __init__(
        self, packed: PackedRows, kernels: ModuleType, *, kv_heads: int, head_dim: int, block_size: int,
        queries_per_tile: int, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        device = packed.input_ids.device
        segments = _Segments(packed, block_size)
        cache = PagedCache(
            layers=1, kv_heads=kv_heads, head_dim=head_dim, blocks=segments.num_blocks,
            block_size=block_size, dtype=dtype, device=device,
        )  # fmt: skip
        cache.reserve()
        queries = segment_queries(
            segments.starts, segments.ends, segments.blocks, queries_per_tile, device
        )
        slots, source, target = (
            send(torch.from_numpy(np.concatenate(arrays)), device)
            for arrays in (segments.slots, segments.source, segments.target)
        )
        super().__init__(cache, kernels, slots, queries)
        self._source, self._target = source, target

    def cache_layer(self, layer: int) -> int:
        return 0

    def attend(self, q: Tensor, *, layer: int, scaling: float) -> Tensor:
        if len(self._source):  # a response's first block starts with the end of its prompt
            size = self.cache.block_size
            for plane in self.cache.layer(0):
                plane[self._target // size, :, self._target % size] = plane[
                    self._source // size, :, self._source % size
                ]
        return super().attend(q, layer=layer, scaling=scaling)


class _Segments:
    """The blocks of packed prompts and responses; a response shares the full blocks of its prompt."""

    def __init__(self, packed: PackedRows, size: int) -> None:
        self._size = size
        self.num_blocks = 1  # block 0 is the null block
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.blocks: list[list[int]] = []
        self.slots: list[np.ndarray] = []  # slot of each packed token
        # Slots of the prompt to copy into the first block of a response.
        self.source, self.target = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        prompts = [self._add(0, length, []) for length in packed.layout.root_lengths]
        for parent, length in packed.layout.children:
            begin = packed.layout.root_lengths[parent]
            full_blocks, tail = divmod(begin, size)
            blocks = self._add(begin, begin + length, prompts[parent][:full_blocks])
            if tail and length:
                offset = np.arange(tail)
                self.source.append(prompts[parent][full_blocks] * size + offset)
                self.target.append(blocks[full_blocks] * size + offset)

    def _add(self, begin: int, end: int, shared: list[int]) -> list[int]:
        """Adds a segment of positions [begin, end); returns its block table."""
        size = self._size
        new = list(range(self.num_blocks, self.num_blocks + -(-end // size) - begin // size))
        self.num_blocks += len(new)
        blocks = [*shared, *new]
        position = np.arange(begin, end)
        self.slots.append(np.array(blocks, np.int64)[position // size] * size + position % size)
        self.starts.append(begin)
        self.ends.append(end)
        self.blocks.append(blocks or [0])
        return blocks
