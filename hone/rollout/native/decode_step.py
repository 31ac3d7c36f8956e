"""The running sequences as device tensors, and the decode steps over them, eager or as CUDA graphs.

Row i of the batch is sequence i. Between two decode chunks, the host fills the rows and reads the
sampled tokens. A CUDA graph contains a whole step (forward, logits, sampling, state update), so the host
launches many steps without waiting. Batches are padded to the next captured size.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hone.protocol.rows import to_device

if TYPE_CHECKING:
    from hone.rollout.native.paged_layouts import ExactLayout, PagedDecode

logger = logging.getLogger(__name__)

MAX_STOP_IDS = 8
"""Maximum number of stop tokens that the GPU checks per row; the host checks requests with more."""
STATE_FIELDS = ("token", "position", "slot", "seed", "max_length", "finished", "num_sampled")
"""The names of a row's values in `state`, in the order that the kernels expect."""
_FINISHED = STATE_FIELDS.index("finished")
_INPUT_FIELDS = ("state", "inverse_temperature", "greedy", "stop_ids", "block_table")
"""The tensors of a batch that the host writes."""


@dataclass(frozen=True)
class BatchState:
    """The inputs and the state of R sequences, and the outputs of a decode chunk of up to C steps.

    A decode chunk is the steps between two reads by the host. The host fills its own copy, which has C = 0,
    and copies rows of it to the device.
    """

    state: Tensor  # [7, R] int64; state[i] has STATE_FIELDS[i] of every row
    inverse_temperature: Tensor  # [R] float32; 1 where greedy
    greedy: Tensor  # [R] int32; 1 where the temperature is 0
    stop_ids: Tensor  # [R, MAX_STOP_IDS] int64, -1 where unused
    block_table: Tensor  # [R, max_blocks_per_seq] int32
    tokens_out: Tensor  # [R, C] int32, the tokens that a decode chunk has sampled
    log_probs_out: Tensor  # [R, C] float32

    token = property(lambda self: self.state[0])
    """The input token of the next step."""
    position = property(lambda self: self.state[1])
    """The position of `token` in the sequence."""
    slot = property(lambda self: self.state[2])
    """The cache slot for the key of `token`: block * block_size + offset."""
    seed = property(lambda self: self.state[3])
    max_length = property(lambda self: self.state[4])
    """The maximum length of prompt and response."""
    finished = property(lambda self: self.state[5])
    num_sampled = property(lambda self: self.state[6])
    """The number of tokens sampled since the host last read them."""

    @property
    def num_rows(self) -> int:
        return len(self.greedy)

    @staticmethod
    def empty(
        num_rows: int, max_blocks_per_seq: int, chunk_capacity: int, device: torch.device
    ) -> BatchState:
        """Returns rows without sequences."""
        with device:
            state = BatchState(
                torch.zeros(len(STATE_FIELDS), num_rows, dtype=torch.int64),
                torch.ones(num_rows, dtype=torch.float32),
                torch.zeros(num_rows, dtype=torch.int32),
                torch.full((num_rows, MAX_STOP_IDS), -1, dtype=torch.int64),
                torch.zeros(num_rows, max_blocks_per_seq, dtype=torch.int32),
                torch.zeros(num_rows, chunk_capacity, dtype=torch.int32),
                torch.zeros(num_rows, chunk_capacity, dtype=torch.float32),
            )
        state.clear_from(0)
        return state

    def rows(self, begin: int, end: int) -> BatchState:
        """Returns rows [begin, end); the tensors are views."""
        state, *others = (getattr(self, f.name) for f in fields(self))
        return BatchState(state[:, begin:end], *(tensor[begin:end] for tensor in others))

    def fill(
        self,
        begin: int,
        states: Sequence[tuple[int, ...]],
        *,
        temperatures: Sequence[float],
        stop_ids: Sequence[Sequence[int]],
        blocks: Sequence[Sequence[int]],
    ) -> None:
        """Fills rows of the host's copy, beginning with row `begin`; each list has one entry per row.

        An entry of `states` has one value per name in STATE_FIELDS.
        """
        if not states:
            return
        rows = self.rows(begin, begin + len(states))
        rows.state.copy_(torch.tensor(states).T)
        temperature = torch.tensor(temperatures, dtype=torch.float32)
        rows.greedy.copy_(temperature == 0)
        rows.inverse_temperature.copy_(1.0 / torch.where(temperature == 0, 1.0, temperature))
        # torch takes much longer than numpy to write short rows.
        stop_id_rows, block_rows = rows.stop_ids.numpy(), rows.block_table.numpy()
        for row, (ids, block_ids) in enumerate(zip(stop_ids, blocks, strict=True)):
            stop_id_rows[row] = [*ids[:MAX_STOP_IDS], *[-1] * (MAX_STOP_IDS - len(ids))]
            block_rows[row, : len(block_ids)] = block_ids

    def clear_from(self, row: int) -> None:
        """Marks all rows from `row` as empty: they write to the null block and sample nothing."""
        self.state[:, row:] = 0
        self.state[_FINISHED, row:] = 1
        self.block_table[row:] = 0

    def copy_to(self, device_state: BatchState, begin: int, end: int) -> None:
        """Copies rows [begin, end) from the host to the device, in stream order."""
        source, target = self.rows(begin, end), device_state.rows(begin, end)
        for name in _INPUT_FIELDS:
            rows = getattr(source, name).contiguous()
            getattr(target, name).copy_(to_device(rows, target.state.device))


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
        batch = self._batch_state.rows(0, size)
        hidden = self._forward(batch.token, batch.position, self._make_layout(batch))
        logits = self._compute_logits(hidden)
        if sample:
            self._kernels.sample(logits, batch, self._block_size)
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
