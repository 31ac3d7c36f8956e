"""Orders rows by a new permutation per epoch, from one seed; a resumed run continues the same order.

An incomplete batch at the end of an epoch is dropped.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from hone.config import ConfigError
from hone.config.checks import mesh_problems
from hone.config.sft import SupervisedConfig
from hone.data.rows import DataError

_UNCHANGING_FIELDS = {
    "rows": "number of rows",
    "batch_rows": "data.train_batch_size",
    "seed": "data.seed (or data.shuffle)",
}
"""Fields of the state that must not change when a run resumes: {field: name in messages}."""


def check_divisible(rows_per_batch: int, num_slots: int) -> None:
    """Raises an error unless every data-parallel slot gets the same number of rows of a batch."""
    remainder = rows_per_batch % num_slots
    if remainder:
        lower = rows_per_batch - remainder
        raise ConfigError(
            f"data.train_batch_size={rows_per_batch} is not divisible by {num_slots} data-parallel ranks; "
            f"use {lower or num_slots} or {lower + num_slots}"
        )


def data_parallel_slots(config: SupervisedConfig, num_ranks: int) -> int:
    """Returns the number of data-parallel slots; raises an error if ranks cannot be divided into slots."""
    problems = list(mesh_problems(num_ranks, "", config, "engine", config.engine))
    if problems:
        raise ConfigError(problems)
    return num_ranks // config.ranks_per_slot


def batches_per_epoch(num_rows: int, rows_per_batch: int) -> int:
    """Returns the number of whole batches per epoch; raises an error if the rows do not fill a batch."""
    if num_rows < rows_per_batch:
        raise DataError(
            f"there are {num_rows} rows to train on, fewer than one batch of {rows_per_batch}; use "
            f"data.train_batch_size={num_rows} or less"
        )
    return num_rows // rows_per_batch


class RowOrder:
    """An endless sequence of batches of row indices, with a position that a checkpoint saves."""

    def __init__(
        self, num_rows: int, rows_per_batch: int, *, seed: int, shuffle: bool = True
    ) -> None:
        self.batches_per_epoch = batches_per_epoch(num_rows, rows_per_batch)
        self.num_rows, self.rows_per_batch = num_rows, rows_per_batch
        self._seed, self._shuffle = seed, shuffle
        self.epoch = self.batch_index = 0
        self._seek(epoch=0, batch_index=0)

    def next_batch(self) -> list[int]:
        """Returns the row indices of the next batch, and advances the position."""
        if self.batch_index == self.batches_per_epoch:
            self.epoch, self.batch_index = self.epoch + 1, 0
            self._order = self._next_order()
        start = self.batch_index * self.rows_per_batch
        self.batch_index += 1
        return self._order[start : start + self.rows_per_batch]

    def state_dict(self) -> dict[str, int | None]:
        return {
            "epoch": self.epoch,
            "batch": self.batch_index,
            "rows": self.num_rows,
            "batch_rows": self.rows_per_batch,
            "seed": self._seed if self._shuffle else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the last batch of `state`; raises an error if the data or the order differ."""
        current_state = self.state_dict()
        for name, description in _UNCHANGING_FIELDS.items():
            if state[name] != current_state[name]:
                raise DataError(
                    f"the checkpoint was written with {description} {state[name]}, this run has "
                    f"{current_state[name]}; restore it, or set another trainer.default_local_dir for a "
                    "new run (trainer.resume_mode=disable starts anew in this one)"
                )
        self._seek(state["epoch"], state["batch"])

    def _seek(self, epoch: int, batch_index: int) -> None:
        """Sets the position to a batch of an epoch."""
        self._generator = random.Random(self._seed)
        for _ in range(epoch + 1):  # each permutation depends on the previous one
            self._order = self._next_order()
        self.epoch, self.batch_index = epoch, batch_index

    def _next_order(self) -> list[int]:
        order = list(range(self.num_rows))
        if self._shuffle:
            self._generator.shuffle(order)
        return order
