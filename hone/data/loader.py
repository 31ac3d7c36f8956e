"""An endless loader of prompt batches; the seed sets its order, which resumes exactly from a checkpoint."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Protocol, TypedDict

import numpy as np

from hone.data.rows import DataError
from hone.data.samplers import Mixture, Ordered, Sampler, Shuffled, Stateful
from hone.types import Row, Settings

if TYPE_CHECKING:
    from hone.protocol import DataProto

logger = logging.getLogger(__name__)

Batch = dict[str, np.ndarray]

STATE_VERSION = 1


class Dataset(Protocol):
    """The dataset interface of the loader; `RLHFDataset` offers more (key, state, on_batch_end)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


class LoaderState(TypedDict):
    """The position of a loader in plain values."""

    version: int
    order: str
    epoch: int
    drawn: int
    past: list[int]
    epoch_rows: int
    counts: list[tuple[int, int]] | None
    sampler: Settings | None
    dataset: Settings | None


def row_uid(dataset: str, row: int, epoch: int, occurrence: int) -> str:
    """Returns 16 hex characters that identify this use of a row, the same when a run is replayed."""
    text = f"{dataset}\x1f{row}\x1f{epoch}\x1f{occurrence}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def collate_fn(rows: Sequence[Row]) -> Batch:
    """Collates rows into object arrays; a column that a row lacks is None there."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: np.empty(len(rows), dtype=object) for name in names}
    for name, column in columns.items():
        for index, row in enumerate(rows):  # one by one, so that numpy keeps lists of equal length
            column[index] = row.get(name)
    return columns


class PromptLoader:
    """Yields batches by epochs; `next_batch()` never ends, `one_epoch()` does."""

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
        default = Shuffled(seed) if shuffle else Ordered()
        self.sampler: Sampler = sampler if sampler is not None else default
        self._order = str(getattr(self.sampler, "name", type(self.sampler).__qualname__))
        self._past: list[int] = []  # length of each finished epoch
        self._counts: Counter[int]  # draws of each row in this epoch
        self._indices: Iterator[int] | None
        self._start_epoch(0)
        if hasattr(self.sampler, "update") and not isinstance(sampler, Stateful):
            logger.warning(
                "%s learns from batches but has no state_dict(): a resumed run will not draw the"
                " rows that an uninterrupted one would",
                self._order,
            )

    @property
    def batches_per_epoch(self) -> int:
        rows = self._epoch_rows
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.next_batch()

    def next_batch(self) -> Batch:
        """Returns the next batch; starts the next epoch when this one is exhausted."""
        if self._is_epoch_over():
            self._past.append(self._epoch_rows)
            self._start_epoch(self.epoch + 1)
        if self._indices is None:
            # A sampler restored at the end of an epoch may first yield the empty rest of that epoch; its
            # next pass is the new epoch.
            indices = self._iterate_epoch(self.epoch)
            if (first := next(indices, None)) is not None:
                self._indices = chain([first], indices)
            else:
                self._indices = self._iterate_epoch(self.epoch)
        size = min(self.batch_size, self._epoch_rows - self._drawn)
        drawn = [int(index) for index in islice(self._indices, size)]
        if len(drawn) < size:
            raise DataError(
                f"the sampler {self._order} ended after {self._drawn + len(drawn)} rows,"
                f" its length says {self._epoch_rows}"
            )
        batch = self._collate(drawn, self.epoch, self._counts)
        self._drawn += size
        if self._is_epoch_over():
            self._end_pass()
        return batch

    def one_epoch(self) -> Iterator[Batch]:
        """Yields the batches of the first epoch; the loader's position does not change."""
        counts: Counter[int] = Counter()
        indices = map(int, self._iterate_epoch(0))
        while batch := list(islice(indices, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield self._collate(batch, 0, counts)

    def on_batch_end(self, batch: DataProto) -> int:
        """Passes a finished batch to sampler and dataset; returns the number of added rows."""
        if hasattr(self.sampler, "update"):
            self.sampler.update(batch)
        hook = getattr(self.dataset, "on_batch_end", None)
        rows = hook(batch) if hook is not None else None
        if not rows:
            return 0
        if isinstance(self.sampler, Mixture):
            raise DataError(
                "on_batch_end added rows, but data.dataset_weights gives them no share; unset it"
            )
        dataset, before = self.dataset, len(self.dataset)
        assert hasattr(dataset, "append"), "a data set with the hook has it"
        dataset.append(rows)
        return len(dataset) - before

    def state_dict(self) -> LoaderState:
        """Returns the state in plain values, from which drawing continues after the last row."""
        sampler = self.sampler if isinstance(self.sampler, Stateful) else None
        return {
            "version": STATE_VERSION,
            "order": self._order,
            "epoch": self.epoch,
            "drawn": self._drawn,
            "past": list(self._past),
            "epoch_rows": self._epoch_rows,
            "counts": None if sampler is None else sorted(self._counts.items()),
            "sampler": None if sampler is None else sampler.state_dict(),
            "dataset": self.dataset.state_dict() if isinstance(self.dataset, Stateful) else None,
        }

    def load_state_dict(self, state: LoaderState) -> None:
        """Continues from a state of `state_dict`, also with another batch size."""
        if state["version"] != STATE_VERSION:
            raise DataError(f"loader state has version {state['version']}, not {STATE_VERSION}")
        if state["order"] != self._order:
            raise DataError(
                f"the checkpoint drew its rows by {state['order']}, this run by"
                f" {self._order}; keep data.shuffle, data.seed, data.dataset_weights and"
                " data.sampler as they were"
            )
        if state["dataset"] is not None and isinstance(self.dataset, Stateful):
            self.dataset.load_state_dict(state["dataset"])
        self.epoch = state["epoch"]
        self._drawn = state["drawn"]
        self._past = list(state["past"])
        self._epoch_rows = state["epoch_rows"]
        if state["sampler"] is not None and isinstance(self.sampler, Stateful):
            self.sampler.load_state_dict(state["sampler"])
            self._counts = Counter(dict(state["counts"] or ()))
            self._indices = None if self._is_epoch_over() else self._iterate_epoch(self.epoch)
            return
        # Replay the draws without reading rows. Built-in orders need only the current epoch.
        if not hasattr(self.sampler, "epoch_order"):
            for epoch, rows in enumerate(self._past):
                _exhaust(self._iterate_epoch(epoch), rows)
        self._indices = self._iterate_epoch(self.epoch)
        self._counts = Counter(islice(self._indices, self._drawn))
        if self._is_epoch_over():
            self._end_pass()

    def _iterate_epoch(self, epoch: int) -> Iterator[int]:
        if hasattr(self.sampler, "epoch_order"):
            return iter(self.sampler.epoch_order(epoch, self._epoch_rows))
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        return iter(self.sampler)

    def _is_epoch_over(self) -> bool:
        left = self._epoch_rows - self._drawn
        return left <= 0 or (self.drop_last and left < self.batch_size)

    def _start_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._drawn = 0
        self._counts = Counter()
        self._indices = None
        if hasattr(self.sampler, "epoch_order"):
            self._epoch_rows = len(self.dataset)
        else:
            self._epoch_rows = len(self.sampler)
        if self.batch_size < 1:
            raise DataError(f"the batch size is {self.batch_size}; it must be at least 1")
        if self._epoch_rows == 0:
            raise DataError(f"the sampler {self._order} or the data set has no rows")
        if self.batches_per_epoch == 0:
            raise DataError(
                f"the data set has {self._epoch_rows} rows, fewer than one batch of"
                f" {self.batch_size} (data.train_batch_size); use at most {self._epoch_rows}"
            )

    def _end_pass(self) -> None:
        """Exhausts the sampler's pass, so that its state is never in the middle of an epoch."""
        if self._indices is not None:
            _exhaust(self._indices, self._epoch_rows - self._drawn)
        self._indices = None

    def _collate(self, indices: Sequence[int], epoch: int, counts: Counter[int]) -> Batch:
        places = []
        for index in indices:
            name, number = type(self.dataset).__qualname__, index
            if hasattr(self.dataset, "key"):
                name, number = self.dataset.key(index)
            places.append((index, row_uid(str(name), int(number), epoch, counts[index])))
            counts[index] += 1
        return self.rows_again(places)

    def rows_again(self, places: Sequence[tuple[int, str]]) -> Batch:
        """Returns the batch of the rows with these indices and uids."""
        return collate_fn([{**self.dataset[i], "uid": u, "dataset_index": i} for i, u in places])


def _exhaust(indices: Iterator[int], rows: int) -> None:
    deque(islice(indices, rows + 1), maxlen=0)  # +1 lets the pass end
