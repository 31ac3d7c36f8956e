"""The running sequences as device tensors, so that a chunk of decode steps runs without the host.

Row i of the batch is sequence i. Between two chunks the host fills the rows and reads the sampled
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from hone.ops.device import send

MAX_STOP_IDS = 8
"""Stop tokens per row that the GPU checks; the host checks requests that have more."""
STATE_FIELDS = ("token", "position", "slot", "seed", "max_length", "finished", "num_sampled")
"""The names of a row's values in `state`, in the order that the kernels expect."""
_FINISHED = STATE_FIELDS.index("finished")


@dataclass(frozen=True)
class BatchState:
    """The device tensors of a batch of R rows, and of chunks of up to C tokens per row."""

    state: Tensor  # [7, R] int64; state[i] has STATE_FIELDS[i] of every row
    inverse_temperature: Tensor  # [R] float32; 1 where greedy
    greedy: Tensor  # [R] int32; 1 where the temperature is 0
    stop_ids: Tensor  # [R, MAX_STOP_IDS] int64, -1 where unused
    block_table: Tensor  # [R, max_blocks_per_seq] int32
    tokens_out: Tensor  # [R, C] int32, the tokens that a chunk has sampled
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

    @staticmethod
    def empty(
        num_rows: int, max_blocks_per_seq: int, chunk_capacity: int, device: torch.device
    ) -> BatchState:
        host = HostBatch(num_rows, max_blocks_per_seq)
        inputs = [torch.from_numpy(getattr(host, f.name)).to(device) for f in fields(host)]
        outputs = [
            torch.zeros(num_rows, chunk_capacity, dtype=dtype, device=device)
            for dtype in (torch.int32, torch.float32)
        ]
        return BatchState(*inputs, *outputs)

    def rows(self, begin: int, end: int) -> BatchState:
        """Returns rows [begin, end); the tensors are views."""
        state, *others = (getattr(self, f.name) for f in fields(self))
        return BatchState(state[:, begin:end], *(tensor[begin:end] for tensor in others))


@dataclass(init=False)
class HostBatch:
    """The host's copy of the batch state as numpy arrays."""

    state: np.ndarray
    inverse_temperature: np.ndarray
    greedy: np.ndarray
    stop_ids: np.ndarray
    block_table: np.ndarray

    def __init__(self, num_rows: int, max_blocks_per_seq: int) -> None:
        self.state = np.zeros((len(STATE_FIELDS), num_rows), np.int64)
        self.state[_FINISHED] = 1
        self.inverse_temperature = np.ones(num_rows, np.float32)
        self.greedy = np.zeros(num_rows, np.int32)
        self.stop_ids = np.full((num_rows, MAX_STOP_IDS), -1, np.int64)
        self.block_table = np.zeros((num_rows, max_blocks_per_seq), np.int32)

    def fill(
        self,
        begin: int,
        states: Sequence[tuple[int, ...]],
        *,
        temperatures: Sequence[float],
        stop_ids: Sequence[Sequence[int]],
        blocks: Sequence[Sequence[int]],
    ) -> None:
        """Fills the rows from `begin` on; each list has one entry per row.

        An entry of `states` has one value per name in STATE_FIELDS.
        """
        if not states:
            return
        rows = slice(begin, begin + len(states))
        self.state[:, rows] = np.array(states, np.int64).T
        temperature = np.array(temperatures, np.float32)
        self.greedy[rows] = temperature == 0
        self.inverse_temperature[rows] = 1.0 / np.where(temperature == 0, 1.0, temperature)
        for row, (ids, block_ids) in enumerate(zip(stop_ids, blocks, strict=True), begin):
            self.stop_ids[row] = [*ids[:MAX_STOP_IDS], *[-1] * (MAX_STOP_IDS - len(ids))]
            self.block_table[row, : len(block_ids)] = block_ids

    def clear_from(self, row: int) -> None:
        """Marks all rows from `row` as empty: they write to the null block and sample nothing."""
        self.state[:, row:] = 0
        self.state[_FINISHED, row:] = 1
        self.block_table[row:] = 0

    def send(self, device_state: BatchState, begin: int, end: int) -> None:
        """Copies rows [begin, end) to the device, in stream order."""
        target = device_state.rows(begin, end)
        for f in fields(self):
            array = getattr(self, f.name)
            rows = array[:, begin:end] if f.name == "state" else array[begin:end]
            source = torch.from_numpy(np.ascontiguousarray(rows))
            getattr(target, f.name).copy_(send(source, device_state.state.device))
