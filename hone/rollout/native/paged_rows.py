"""The running sequences as tensors: what the GPU needs to draw many tokens without asking the host.

Row i of every tensor is sequence i. The host fills the rows between chunks of steps and reads the drawn
tokens back in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hone.ops.transfer import send

MAX_STOPS = 8
"""Stop tokens a row that the GPU checks itself; a request with more is checked by the host."""
FIELDS = ("token", "position", "slot", "seed", "limit", "finished", "count")
"""Columns of `state`, in the order the kernels know."""


@dataclass(frozen=True)
class RowState:
    """Device tensors of some rows; slices share memory."""

    state: Tensor  # [7, R] int64, see FIELDS
    inverse_temperature: Tensor  # [R] float32; 1 where greedy
    greedy: Tensor  # [R] int32
    stops: Tensor  # [R, MAX_STOPS] int64, -1 where unused
    table: Tensor  # [R, W] int32 pages
    tokens_out: Tensor  # [R, C] int32
    log_probs_out: Tensor  # [R, C] float32

    token = property(lambda self: self.state[0])
    """The token to feed next."""
    position = property(lambda self: self.state[1])
    """Where it stands in its sequence."""
    slot = property(lambda self: self.state[2])
    """Where its key goes: page * page_size + offset."""
    seed = property(lambda self: self.state[3])
    limit = property(lambda self: self.state[4])
    """Longest length of the sequence, prompt included."""
    finished = property(lambda self: self.state[5])
    count = property(lambda self: self.state[6])
    """Tokens drawn since the host last read them."""

    @staticmethod
    def empty(rows: int, width: int, room: int, device: torch.device) -> RowState:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        state = zeros(len(FIELDS), rows, dtype=torch.int64)
        state[FIELDS.index("finished")] = 1
        return RowState(
            state,
            zeros(rows, dtype=torch.float32) + 1,
            zeros(rows, dtype=torch.int32),
            zeros(rows, MAX_STOPS, dtype=torch.int64) - 1,
            zeros(rows, width, dtype=torch.int32),
            zeros(rows, room, dtype=torch.int32),
            zeros(rows, room, dtype=torch.float32),
        )

    def rows(self, begin: int, end: int) -> RowState:
        at = slice(begin, end)
        return RowState(
            self.state[:, at],
            self.inverse_temperature[at],
            self.greedy[at],
            self.stops[at],
            self.table[at],
            self.tokens_out[at],
            self.log_probs_out[at],
        )


class HostRows:
    """The host's copy: filled in numpy, sent in a few copies."""

    def __init__(self, rows: int, width: int) -> None:
        self.state = np.zeros((len(FIELDS), rows), np.int64)
        self.state[FIELDS.index("finished")] = 1
        self.inverse_temperature = np.ones(rows, np.float32)
        self.greedy = np.zeros(rows, np.int32)
        self.stops = np.full((rows, MAX_STOPS), -1, np.int64)
        self.table = np.zeros((rows, width), np.int32)

    def fill(
        self,
        begin: int,
        states: Sequence[tuple[int, ...]],
        *,
        temperatures: Sequence[float],
        stops: Sequence[Sequence[int]],
        pages: Sequence[Sequence[int]],
    ) -> None:
        """Rows from `begin` on, one entry of each argument a row; a state is in the order of FIELDS."""
        if not states:
            return
        at = slice(begin, begin + len(states))
        self.state[:, at] = np.array(states, np.int64).T
        heat = np.array(temperatures, np.float32)
        self.greedy[at] = heat == 0
        self.inverse_temperature[at] = 1.0 / np.where(heat == 0, 1.0, heat)
        for row, (ids, held) in enumerate(zip(stops, pages, strict=True), begin):
            self.stops[row] = [*ids[:MAX_STOPS], *[-1] * (MAX_STOPS - len(ids))]
            self.table[row, : len(held)] = held

    def idle_from(self, row: int) -> None:
        """Rows from here on hold no sequence: they write to the spare page and draw nothing."""
        self.state[:, row:] = 0
        self.state[FIELDS.index("finished"), row:] = 1
        self.table[row:] = 0

    def send(self, device: RowState, begin: int, end: int) -> None:
        """Rows [begin, end) to the device, in stream order."""
        target = device.rows(begin, end)
        at = slice(begin, end)
        target.state.copy_(send(torch.from_numpy(self.state[:, at].copy()), device.state.device))
        for name in ("inverse_temperature", "greedy", "stops", "table"):
            source = torch.from_numpy(np.ascontiguousarray(getattr(self, name)[at]))
            getattr(target, name).copy_(send(source, device.state.device))
