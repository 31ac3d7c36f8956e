"""Decode steps, eager or as captured CUDA graphs, one per batch size.

A graph contains the whole step (forward, logits, sampling, state update), so the host can launch many
steps without waiting. Batches are padded to the next captured size.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from hone.rollout.native.batch_state import BatchState
from hone.rollout.native.exact_layouts import ExactLayout
from hone.rollout.native.paged_layouts import PagedDecode

logger = logging.getLogger(__name__)


def graph_sizes(max_num_seqs: int, configured: Sequence[int] | None) -> list[int]:
    """Returns the batch sizes to capture."""
    if configured:
        return sorted({min(size, max_num_seqs) for size in configured} | {max_num_seqs})
    sizes = {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256}
    sizes |= set(range(320, max_num_seqs + 1, 64))
    return sorted(size for size in sizes | {max_num_seqs} if size <= max_num_seqs)


class DecodeStep:
    """Runs decode steps over the first `n` rows of the batch state."""

    def __init__(
        self,
        forward: Callable[..., Tensor],
        logits: Callable[[Tensor], Tensor],
        layout: Callable[[BatchState], PagedDecode | ExactLayout],
        rows: BatchState,
        kernels: ModuleType,
        *,
        block_size: int,
        sizes: Sequence[int],
        graphs: bool,
        may_synchronize: bool,
    ) -> None:
        self._forward, self._logits, self._layout, self._rows = forward, logits, layout, rows
        self._kernels, self._block_size = kernels, block_size
        self._sizes = list(sizes)
        self._use_graphs = graphs
        self._may_synchronize = may_synchronize  # such a forward cannot be captured
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: torch.cuda._POOL_HANDLE | None = None

    def discard_graphs(self) -> None:
        """Drops the graphs, which read moved parameters; the last graph frees the memory pool."""
        self._graphs.clear()
        self._pool = None

    def run(self, rows: int, *, sample: bool) -> Tensor:
        """Runs one step and returns logits [size, V]; if not `sample`, the caller samples from them."""
        size = next(size for size in self._sizes if size >= rows)
        if self._use_graphs and self._may_synchronize:
            self._use_graphs, self._may_synchronize = not self._synchronizes(size), False
        if not self._use_graphs:
            return self._compute(size, sample)
        if (size, sample) not in self._graphs:
            self._graphs[size, sample] = self._capture(size, sample)
        graph, logits = self._graphs[size, sample]
        graph.replay()
        return logits

    def _compute(self, size: int, sample: bool) -> Tensor:
        rows = self._rows.rows(0, size)
        hidden = self._forward(rows.token, rows.position, self._layout(rows))
        logits = self._logits(hidden)
        if sample:
            self._kernels.sample(logits, rows, self._block_size)
        return logits

    def _synchronizes(self, size: int) -> bool:
        """Whether a step synchronizes with the device, as some expert routers do."""
        state = self._rows.state.clone()
        self._rows.finished.fill_(1)  # finished rows sample nothing
        self._compute(size, sample=False)  # compiles the kernels
        debug_mode = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings(record=True) as records:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                self._compute(size, sample=False)
        finally:
            torch.cuda.set_sync_debug_mode(debug_mode)
            self._rows.state.copy_(state)
        synchronizes = any("synchronizing CUDA operation" in str(r.message) for r in records)
        if synchronizes:
            logger.info("this model's layers synchronize: decoding without CUDA graphs")
        return synchronizes

    def _capture(self, size: int, sample: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Captures a step, after warm-up steps that compile kernels and allocate workspaces."""
        state = self._rows.state.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._rows.finished.fill_(1)  # finished rows sample nothing
            for _ in range(2):
                self._compute(size, sample)
        torch.cuda.current_stream().wait_stream(stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._compute(size, sample)
        self._rows.state.copy_(state)
        return graph, logits
