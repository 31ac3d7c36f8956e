"""Loads batches of prompts epoch after epoch; a restored loader continues with the same rows.

`PromptBatches` draws and collates the rows; `PromptLoader` starts the epochs, and saves and restores
the position for a checkpoint.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Protocol, TypeGuard

from hone.data.prompts import Batch, PromptBatches, exhaust
from hone.data.rows import DataError
from hone.data.samplers import AllRows, EpochOrder, Sampler
from hone.types import Fields, Row, Settings

if TYPE_CHECKING:
    from hone.protocol import DataProto

logger = logging.getLogger(__name__)

STATE_VERSION = 1


class Dataset(Protocol):
    """The methods that the loader needs; `key`, `state_dict` and `on_batch_end` are optional."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


class Stateful(Protocol):
    """A sampler, dataset or generator whose state is saved in the checkpoint as plain values."""

    def state_dict(self) -> Fields: ...

    def load_state_dict(self, state: Settings) -> None: ...


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Returns whether the state of `value` is saved.

    From Python 3.12 on, `isinstance` would not find the methods of a wrapper with `__getattr__`.
    """
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


class PromptLoader(PromptBatches):
    """Iterates over batches endlessly, epoch after epoch; the state is saved in checkpoints."""

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int | None,
        drop_last: bool,
        sampler: Sampler | None = None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.sampler = AllRows(shuffle=shuffle, seed=seed) if sampler is None else sampler
        self.order_name = str(getattr(self.sampler, "name", type(self.sampler).__qualname__))
        self._past_epoch_sizes: list[int] = []
        self.start_epoch(0)
        if hasattr(self.sampler, "update") and not is_stateful(sampler):
            logger.warning(
                "%s is updated by batches but has no state_dict(): a resumed run will not draw the"
                " rows that an uninterrupted run would",
                self.order_name,
            )

    @property
    def batches_per_epoch(self) -> int:
        num_whole_batches, num_remaining = divmod(self._epoch_size, self.batch_size)
        has_partial_batch = num_remaining > 0 and not self.drop_last
        return num_whole_batches + has_partial_batch

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.next_batch()

    def first_epoch(self) -> Iterator[Batch]:
        """Yields the batches of the first epoch; the loader's position does not change."""
        counts: Counter[int] = Counter()
        indices = map(int, self._row_indices(0))
        while batch := list(islice(indices, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield self._collate(batch, 0, counts)

    def start_epoch(self, epoch: int) -> None:
        if epoch > 0:
            self._past_epoch_sizes.append(self._epoch_size)
        self.epoch = epoch
        self._num_drawn = 0
        self._draw_counts = Counter()
        if isinstance(self.sampler, EpochOrder):
            self._epoch_size = len(self.dataset)
            self._indices = self._row_indices(epoch)
        else:
            self._epoch_size = len(self.sampler)
            # `next_batch` iterates over the sampler only after the sampler's last `update`.
            self._indices = None
        if self.batch_size < 1:
            raise DataError(f"the batch size is {self.batch_size}; it must be at least 1")
        if self._epoch_size == 0:
            raise DataError(f"the sampler {self.order_name} or the data set has no rows")
        if self.batches_per_epoch == 0:
            raise DataError(
                f"the data set has {self._epoch_size} rows, fewer than one batch of"
                f" {self.batch_size} (data.train_batch_size); use at most {self._epoch_size}"
            )

    def iterate_epoch(self, epoch: int) -> Iterator[int]:
        indices = self._row_indices(epoch)
        first = next(indices, None)
        if first is not None:
            return chain([first], indices)
        # A sampler that was restored at an epoch's end first yields the empty rest of that epoch.
        return self._row_indices(epoch)

    def _row_indices(self, epoch: int) -> Iterator[int]:
        """Yields the row indices that the sampler returns for an epoch."""
        if isinstance(self.sampler, EpochOrder):
            return iter(self.sampler.epoch_order(epoch, self._epoch_size))
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        return iter(self.sampler)

    def on_batch_end(self, batch: DataProto) -> int:
        """Passes a finished batch to sampler and dataset; returns the number of added rows."""
        if hasattr(self.sampler, "update"):
            self.sampler.update(batch)
        callback = getattr(self.dataset, "on_batch_end", None)
        rows = callback(batch) if callback is not None else None
        if not rows:
            return 0
        if isinstance(self.sampler, EpochOrder) and not self.sampler.has_added_rows:
            key = "data.dataset_weights"
            raise DataError(
                f"on_batch_end added rows, but {key} gives no weight to them; unset {key}"
            )
        dataset, old_length = self.dataset, len(self.dataset)
        assert hasattr(dataset, "append"), "a data set with on_batch_end has append"
        dataset.append(rows)
        return len(dataset) - old_length

    def state_dict(self) -> Fields:
        """Returns the state in plain values.

        `past` has the number of rows of each finished epoch, and `epoch_rows` that of this epoch;
        `drawn` and `counts` are the draws of this epoch, in total and by row.
        """
        sampler = self.sampler if is_stateful(self.sampler) else None
        return {
            "version": STATE_VERSION,
            "order": self.order_name,
            "epoch": self.epoch,
            "drawn": self._num_drawn,
            "past": list(self._past_epoch_sizes),
            "epoch_rows": self._epoch_size,
            "counts": None if sampler is None else sorted(self._draw_counts.items()),
            "sampler": None if sampler is None else sampler.state_dict(),
            "dataset": self.dataset.state_dict() if is_stateful(self.dataset) else None,
        }

    def load_state_dict(self, state: Settings) -> None:
        """Restores a state, even of a loader with another batch size."""
        if state["version"] != STATE_VERSION:
            raise DataError(f"loader state has version {state['version']}, not {STATE_VERSION}")
        if state["order"] != self.order_name:
            raise DataError(
                f"the row order of the checkpoint is {state['order']}, of this run"
                f" {self.order_name}; keep data.shuffle, data.seed, data.dataset_weights and"
                " data.sampler as they were"
            )
        if state["dataset"] is not None and is_stateful(self.dataset):
            self.dataset.load_state_dict(state["dataset"])
        self.epoch = state["epoch"]
        self._num_drawn = state["drawn"]
        self._past_epoch_sizes = list(state["past"])
        self._epoch_size = state["epoch_rows"]
        if state["sampler"] is not None and is_stateful(self.sampler):
            self.sampler.load_state_dict(state["sampler"])
            self._draw_counts = Counter(dict(state["counts"] or ()))
            self._indices = None if self._is_epoch_over() else self._row_indices(self.epoch)
            return
        # Replay the draws without reading rows. Built-in orders need only the current epoch.
        if not isinstance(self.sampler, EpochOrder):
            for epoch, num_rows in enumerate(self._past_epoch_sizes):
                exhaust(self._row_indices(epoch), num_rows)
        self._indices = self._row_indices(self.epoch)
        self._draw_counts = Counter(islice(self._indices, self._num_drawn))
        if self._is_epoch_over():
            self._exhaust_sampler()
