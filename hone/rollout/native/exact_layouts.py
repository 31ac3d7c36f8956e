"""Exact attention's view of a batch: which row of pages each query reads, and up to where.

Decoding, prompts and training rows all become the same thing, so that one kernel serves them all.
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
"""Query heads that one program of the GPU kernel takes, whatever the batch: part of the arithmetic."""


@dataclass(frozen=True)
class Tiles:
    """Neighbouring queries of one sequence that the GPU kernel takes at once; each [T] int64."""

    token: Tensor  # first query
    count: Tensor
    position: Tensor  # of the first query
    row: Tensor  # of the table


@dataclass(frozen=True)
class Queries:
    """Every query's place; a query sees the cells of its row up to its own position."""

    position: Tensor  # [N] int64
    row: Tensor  # [N] int64
    table: Tensor  # [R, W] int32 pages
    tiles: Tiles | None
    """For the GPU kernel."""


def queries_per_tile(heads: int, kv_heads: int) -> int:
    group = heads // kv_heads
    if group > TILE_ROWS:
        raise ValueError(
            f"{group} query heads a key head are more than exact attention's {TILE_ROWS}"
        )
    return TILE_ROWS // (1 << (group - 1).bit_length())


def decode_queries(table: Tensor, positions: Tensor) -> Queries:
    """One query a row."""
    row = torch.arange(len(positions), device=positions.device)
    return Queries(positions, row, table, Tiles(row, torch.ones_like(row), positions, row))


def segment_queries(
    starts: list[int], ends: list[int], pages: list[list[int]], per_tile: int, device: torch.device
) -> Queries:
    """Segment i is the queries at positions [start, end) of row i; segments follow each other."""
    lengths = np.array(ends) - np.array(starts)
    first = np.cumsum(lengths) - lengths
    position = np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)])
    table = np.zeros((len(pages), max(map(len, pages))), np.int32)
    for row, held in enumerate(pages):
        table[row, : len(held)] = held
    offsets = [np.arange(0, n, per_tile) for n in lengths]
    of = np.repeat(np.arange(len(offsets)), [len(o) for o in offsets])
    offset = np.concatenate(offsets)
    tiles = (
        first[of] + offset,
        np.minimum(lengths[of] - offset, per_tile),
        np.array(starts)[of] + offset,
        of,
    )

    def sent(values: np.ndarray, dtype: type[np.integer] = np.int64) -> Tensor:
        return send(torch.from_numpy(np.ascontiguousarray(values, dtype)), device)

    return Queries(
        sent(position),
        sent(np.repeat(np.arange(len(lengths)), lengths)),
        sent(table, np.int32),
        Tiles(*(sent(t) for t in tiles)),
    )


class ExactLayout:
    """Where keys go and how queries attend, over one cache."""

    def __init__(
        self, cache: PagedCache, kernels: ModuleType, slots: Tensor, queries: Queries
    ) -> None:
        self.cache, self.slots, self.queries = cache, slots, queries
        self.positions = queries.position
        self._kernels = kernels

    def attend(self, q: Tensor, *, layer: int, scaling: float) -> Tensor:
        return self._kernels.query_attention(q, self.cache, layer, self.queries, scaling=scaling)


def prefill_layout(
    cache: PagedCache,
    kernels: ModuleType,
    pages: list[list[int]],
    starts: list[int],
    lengths: list[int],
    per_tile: int,
    device: torch.device,
) -> ExactLayout:
    """New tokens of several sequences, each after the tokens its pages already hold."""
    ends = [a + n for a, n in zip(starts, lengths, strict=True)]
    queries = segment_queries(starts, ends, pages, per_tile, device)
    at = queries.position
    page = queries.table[queries.row, at // cache.page_size].long()
    return ExactLayout(cache, kernels, page * cache.page_size + at % cache.page_size, queries)


class TrainingLayout(ExactLayout):
    """Packed rows of a training forward, in pages of their own that each layer writes anew."""

    def __init__(
        self, packed: PackedRows, kernels: ModuleType, *, kv_heads: int, head_dim: int, page_size: int,
        per_tile: int, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        device = packed.input_ids.device
        rows = _segments(packed, page_size)
        cache = PagedCache(
            layers=1, kv_heads=kv_heads, head_dim=head_dim, pages=rows.pages, page_size=page_size,
            dtype=dtype, device=device,
        )  # fmt: skip
        cache.reserve()
        queries = segment_queries(rows.starts, rows.ends, rows.held, per_tile, device)
        super().__init__(cache, kernels, send(torch.from_numpy(rows.slots), device), queries)
        self._from, self._to = (send(torch.from_numpy(c), device) for c in rows.copies)

    def attend(self, q: Tensor, *, layer: int, scaling: float) -> Tensor:
        if len(self._from):  # the page in which a response begins holds the end of its prompt too
            size = self.cache.page_size
            for plane in self.cache.layer(0):
                plane[self._to // size, :, self._to % size] = plane[
                    self._from // size, :, self._from % size
                ]
        return super().attend(q, layer=0, scaling=scaling)


@dataclass(frozen=True)
class _Segments:
    starts: list[int]
    ends: list[int]
    held: list[list[int]]
    slots: np.ndarray  # [N] cell of each packed token
    copies: tuple[np.ndarray, np.ndarray]
    """Cells of prompts that a response's first page repeats, and where."""
    pages: int


def _segments(packed: PackedRows, size: int) -> _Segments:
    """Pages for roots and children; a child reads its parent's full pages."""
    layout = packed.layout
    starts, ends, held, slots = [], [], list[list[int]](), []
    source, target = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    free = 1  # page 0 is spare

    def take(begin: int, end: int, shared: list[int]) -> list[int]:
        nonlocal free
        own = list(range(free, free + -(-end // size) - begin // size))
        free += len(own)
        pages = [*shared, *own]
        position = np.arange(begin, end)
        slots.append(np.array(pages, np.int64)[position // size] * size + position % size)
        starts.append(begin)
        ends.append(end)
        held.append(pages or [0])
        return pages

    roots = [take(0, length, []) for length in layout.root_lengths]
    for parent, length in layout.children:
        begin = layout.root_lengths[parent]
        whole, tail = divmod(begin, size)
        pages = take(begin, begin + length, roots[parent][:whole])
        if tail and length:
            offset = np.arange(tail)
            source.append(roots[parent][whole] * size + offset)
            target.append(pages[whole] * size + offset)
    copies = (np.concatenate(source), np.concatenate(target))
    return _Segments(starts, ends, held, np.concatenate(slots), copies, free)
