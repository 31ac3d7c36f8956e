"""One decode step, as a recorded graph for each batch size, or eagerly where graphs are unwanted.

A graph holds the whole step: forward, logits, draw, and the state for the next step, so that many
replays run back to back without the host. Rows are padded up to the next recorded size.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from hone.rollout.native.exact_layouts import ExactLayout
from hone.rollout.native.paged_cache import PagedCache
from hone.rollout.native.paged_layouts import PagedDecode
from hone.rollout.native.paged_rows import RowState

logger = logging.getLogger(__name__)

_PROGRAMS = 512
"""Attention programs that fill a large GPU; a small batch is split over keys to reach it."""
_MOST_SPLITS = 16


def bucket_sizes(most: int, given: Sequence[int] | None) -> list[int]:
    """Batch sizes worth a graph: fine where small, in steps of a quarter where large."""
    if given:
        return sorted({min(size, most) for size in given} | {most})
    sizes = {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256}
    sizes |= set(range(320, most + 1, 64))
    return sorted(size for size in sizes | {most} if size <= most)


def splits_for(rows: int, kv_heads: int) -> int:
    wanted = _PROGRAMS // max(rows * kv_heads, 1)
    return min(_MOST_SPLITS, 1 << max(0, int(math.log2(max(wanted, 1)))))


class DecodeStep:
    """Runs decode steps over the first `n` rows of the state."""

    def __init__(
        self,
        forward: Callable[..., Tensor],
        logits: Callable[[Tensor], Tensor],
        layout: Callable[[RowState], PagedDecode | ExactLayout],
        rows: RowState,
        kernels: ModuleType,
        *,
        page_size: int,
        sizes: Sequence[int],
        graphs: bool,
        known_forward: bool = True,
    ) -> None:
        self._forward, self._logits, self._layout, self._rows = forward, logits, layout, rows
        self._kernels, self._page_size = kernels, page_size
        self._sizes = list(sizes)
        self._use_graphs = graphs
        self._known_forward = (
            known_forward  # else it may wait for the device, and is tried out first
        )
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: torch.cuda._POOL_HANDLE | None = None

    def forget(self) -> None:
        """Drop the recordings: parameters have moved. Their memory pool ends with the last of them."""
        self._graphs.clear()
        self._pool = None

    def size_for(self, rows: int) -> int:
        """The batch size that `rows` are padded to."""
        return next(size for size in self._sizes if size >= rows)

    def run(self, rows: int, *, draw: bool) -> Tensor:
        """One step; with `draw` the rows move on, else the caller draws from the logits [size, V]."""
        size = self.size_for(rows)
        if self._use_graphs and not self._known_forward:
            self._use_graphs, self._known_forward = self._is_recordable(size), True
        if not self._use_graphs:
            return self._compute(size, draw)
        if (size, draw) not in self._graphs:
            self._graphs[size, draw] = self._record(size, draw)
        graph, logits = self._graphs[size, draw]
        graph.replay()
        return logits

    def _compute(self, size: int, draw: bool) -> Tensor:
        rows = self._rows.rows(0, size)
        hidden = self._forward(rows.token, rows.position, self._layout(rows))
        logits = self._logits(hidden)
        if draw:
            self._kernels.sample(logits, rows, self._page_size)
        return logits

    def _is_recordable(self, size: int) -> bool:
        """Whether a step runs without waiting for the device; the routing of some experts does not."""
        kept = self._rows.state.clone()
        self._rows.finished.fill_(1)  # finished rows draw nothing
        self._compute(size, draw=False)  # kernels compile
        before = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                self._compute(size, draw=False)
        finally:
            torch.cuda.set_sync_debug_mode(before)
            self._rows.state.copy_(kept)
        waits = any("synchronizing CUDA operation" in str(w.message) for w in heard)
        if waits:
            logger.info("this model's layers wait for the device: decoding without CUDA graphs")
        return not waits

    def _record(self, size: int, draw: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Warm up (kernels compile, libraries take their workspaces), then record."""
        kept = self._rows.state.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._rows.finished.fill_(1)  # finished rows draw nothing
            for _ in range(2):
                self._compute(size, draw)
        torch.cuda.current_stream().wait_stream(stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._compute(size, draw)
        self._rows.state.copy_(kept)
        return graph, logits


def decode_layout(cache: PagedCache, kernels: ModuleType, rows: RowState) -> PagedDecode:
    """Attention of one decode step, split over keys where the rows are few."""
    return PagedDecode(
        cache,
        kernels,
        table=rows.table,
        positions=rows.position,
        slots=rows.slot,
        splits=splits_for(len(rows.greedy), cache.kv_heads),
    )
