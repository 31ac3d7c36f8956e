"""Orders rows: a new permutation per epoch from one seed, which a checkpoint resumes exactly.

An incomplete batch at the end of an epoch is dropped.
"""

from __future__ import annotations

import random

from hone.config import ConfigError
from hone.config.checks import uneven_mesh
from hone.config.sft import SupervisedConfig
from hone.data.rows import DataError
from hone.types import Settings

_MUST_BE_EQUAL = {
    "rows": "number of rows",
    "batch_rows": "data.train_batch_size",
    "seed": "data.seed (or data.shuffle)",
}


def check_divisible(rows: int, ranks: int) -> None:
    """Raises an error unless every rank gets the same number of rows of a batch."""
    if rows % ranks:
        raise ConfigError(
            f"data.train_batch_size={rows} is not divisible by {ranks} data-parallel ranks; "
            f"use {rows // ranks * ranks or ranks} or {(rows // ranks + 1) * ranks}"
        )


def data_parallel_slots(config: SupervisedConfig, ranks: int) -> int:
    """Returns the number of data-parallel slots; raise an error if parallel sizes do not divide the ranks."""
    if problems := list(uneven_mesh(ranks, "", config, "engine", config.engine)):
        raise ConfigError(problems)
    return ranks // config.ranks_per_slot


def batches_per_epoch(rows: int, batch_rows: int) -> int:
    """Returns the number of whole batches per epoch, at least one."""
    if rows < batch_rows:
        raise DataError(
            f"there are {rows} rows to train on, fewer than one batch of {batch_rows}; use "
            f"data.train_batch_size={rows} or less"
        )
    return rows // batch_rows


class RowOrder:
    """Produces an endless sequence of batches of row numbers."""

    def __init__(self, rows: int, batch_rows: int, *, seed: int, shuffle: bool = True) -> None:
        self.batches_per_epoch = batches_per_epoch(rows, batch_rows)
        self.rows, self.batch_rows = rows, batch_rows
        self._seed, self._shuffle = seed, shuffle
        self.epoch = self.batch = 0
        self._start(epoch=0, batch=0)

    def next_batch(self) -> list[int]:
        if self.batch == self.batches_per_epoch:
            self.epoch, self.batch = self.epoch + 1, 0
            self._order = self._next_order()
        first = self.batch * self.batch_rows
        self.batch += 1
        return self._order[first : first + self.batch_rows]

    def state_dict(self) -> dict[str, int | None]:
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "rows": self.rows,
            "batch_rows": self.batch_rows,
            "seed": self._seed if self._shuffle else None,
        }

    def load_state_dict(self, state: Settings) -> None:
        """Continues after the last batch of the state; a different data set or order is an error."""
        current = self.state_dict()
        for name, meaning in _MUST_BE_EQUAL.items():
            if state[name] != current[name]:
                raise DataError(
                    f"the checkpoint was written with {meaning} {state[name]}, this run has "
                    f"{current[name]}; restore it, or set another trainer.default_local_dir for a "
                    "new run (trainer.resume_mode=disable starts anew in this one)"
                )
        self._start(state["epoch"], state["batch"])

    def _start(self, epoch: int, batch: int) -> None:
        self._generator = random.Random(self._seed)
        for _ in range(epoch + 1):  # each permutation depends on the previous one
            self._order = self._next_order()
        self.epoch, self.batch = epoch, batch

    def _next_order(self) -> list[int]:
        order = list(range(self.rows))
        if self._shuffle:
            self._generator.shuffle(order)
        return order
