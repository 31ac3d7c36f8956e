"""Runs decode steps, eagerly or as CUDA graphs with one graph per batch size.

A graph contains the whole step (forward, logits, sampling, state update), so the host can launch
many steps without waiting. Batches are padded to the next captured size.
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


def graph_sizes(max_num_seqs: int, configured_sizes: Sequence[int] | None) -> list[int]:
    """Returns the batch sizes to capture, in ascending order."""
    if configured_sizes:
        return sorted({min(size, max_num_seqs) for size in configured_sizes} | {max_num_seqs})
    sizes = {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256}
    sizes |= set(range(320, max_num_seqs + 1, 64))
    return sorted(size for size in sizes | {max_num_seqs} if size <= max_num_seqs)


class DecodeStep:
    """Runs decode steps over the first rows of the batch state."""

    def __init__(
        self,
        forward: Callable[..., Tensor],
        compute_logits: Callable[[Tensor], Tensor],
        make_layout: Callable[[BatchState], PagedDecode | ExactLayout],
        batch_state: BatchState,
        kernels: ModuleType,
        *,
        block_size: int,
        batch_sizes: Sequence[int],
        use_graphs: bool,
        may_synchronize: bool,
    ) -> None:
        self._forward, self._compute_logits = forward, compute_logits
        self._make_layout, self._batch_state = make_layout, batch_state
        self._kernels, self._block_size = kernels, block_size
        self._batch_sizes = list(batch_sizes)
        self._use_graphs = use_graphs
        # A forward that synchronizes with the device cannot be captured; `run` tests this once.
        self._may_synchronize = may_synchronize
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: torch.cuda._POOL_HANDLE | None = None

    def discard_graphs(self) -> None:
        """Drops the graphs and their memory pool; the graphs read old addresses of the parameters."""
        self._graphs.clear()
        self._pool = None

    def run(self, num_rows: int, *, sample: bool) -> Tensor:
        """Runs one step and returns its logits, [padded rows, V].

        The step samples a token per row; without `sample`, the caller samples from the logits.
        """
        size = next(size for size in self._batch_sizes if size >= num_rows)
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
        rows = self._batch_state.rows(0, size)
        hidden = self._forward(rows.token, rows.position, self._make_layout(rows))
        logits = self._compute_logits(hidden)
        if sample:
            self._kernels.sample(logits, rows, self._block_size)
        return logits

    def _synchronizes(self, size: int) -> bool:
        """Whether a step synchronizes with the device, as some expert routers do."""
        state = self._batch_state.state.clone()
        self._batch_state.finished.fill_(1)  # finished rows sample nothing
        self._compute(size, sample=False)  # compiles the kernels
        debug_mode = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings(record=True) as caught_warnings:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                self._compute(size, sample=False)
        finally:
            torch.cuda.set_sync_debug_mode(debug_mode)
            self._batch_state.state.copy_(state)
        synchronizes = any(
            "synchronizing CUDA operation" in str(r.message) for r in caught_warnings
        )
        if synchronizes:
            logger.info("decoding uses no CUDA graphs, because this model's layers synchronize")
        return synchronizes

    def _capture(self, size: int, sample: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Captures a step, after warm-up steps that compile kernels and allocate workspaces."""
        state = self._batch_state.state.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._batch_state.finished.fill_(1)  # finished rows sample nothing
            for _ in range(2):
                self._compute(size, sample)
        torch.cuda.current_stream().wait_stream(stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._compute(size, sample)
        self._batch_state.state.copy_(state)
        return graph, logits
