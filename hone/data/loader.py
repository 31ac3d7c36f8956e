"""An endless, seeded loader of prompt batches that resumes exactly from a checkpoint, and its samplers.

A sampler yields row indices: all rows, several files mixed by weights, or a user's own order.
"""

from __future__ import annotations

import hashlib
import logging
import random
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterator, Sequence, Sized
from itertools import chain, islice
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import numpy as np

from hone.config.data import DataConfig
from hone.data.rows import DataError
from hone.types import Fields, Row, Settings

if TYPE_CHECKING:
    from hone.protocol import DataProto

logger = logging.getLogger(__name__)

Batch = dict[str, np.ndarray]

STATE_VERSION = 1


class Dataset(Protocol):
    """The methods that the loader needs; `key`, `state_dict` and `on_batch_end` are optional."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


def row_uid(dataset: str, row: int, epoch: int, occurrence: int) -> str:
    """Returns 16 hex characters that identify a draw of a row, the same in a replayed run."""
    text = f"{dataset}\x1f{row}\x1f{epoch}\x1f{occurrence}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def collate_fn(rows: Sequence[Row]) -> Batch:
    """Collates rows into object arrays; missing values are None."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: np.empty(len(rows), dtype=object) for name in names}
    for name, column in columns.items():
        for index, row in enumerate(rows):  # one by one, or numpy would convert lists to arrays
            column[index] = row.get(name)
    return columns


@runtime_checkable
class Stateful(Protocol):
    """A sampler, dataset or generator whose state, in plain values, is saved in the checkpoint."""

    def state_dict(self) -> Fields: ...

    def load_state_dict(self, state: Settings) -> None: ...


def permutation(values: Sequence[int], seed: str) -> list[int]:
    """Returns a shuffled copy; a string seed is stable across Python versions."""
    copy = list(values)
    random.Random(seed).shuffle(copy)
    return copy


class AllRows:
    """The default sampler: all rows in file order, or in a new permutation per epoch."""

    def __init__(self, *, shuffle: bool, seed: int | None) -> None:
        self.name = f"shuffle with seed {seed}" if shuffle else "order of the files"
        self._shuffle, self._seed = shuffle, seed

    def epoch_order(self, epoch: int, num_rows: int) -> Iterator[int]:
        rows = range(num_rows)
        return iter(permutation(rows, f"epoch:{self._seed}:{epoch}") if self._shuffle else rows)


class MixtureSampler:
    """Draws rows from several data files in given proportions.

    Each draw takes the file that is furthest behind its share. Each row of a file is drawn once
    before any is repeated; an exhausted file starts over with a new permutation.
    """

    def __init__(
        self,
        indices_by_file: Sequence[Sequence[int]],
        weights: Sequence[float],
        *,
        shuffle: bool,
        seed: int | None,
    ) -> None:
        if len(indices_by_file) != len(weights):
            raise DataError(
                f"data.dataset_weights has {len(weights)} numbers for {len(indices_by_file)} data"
                " files; give one weight per file of data.train_files"
            )
        if any(weight < 0 for weight in weights) or sum(weights) <= 0:
            raise DataError(
                f"data.dataset_weights={list(weights)} needs values of at least 0, and one above 0"
            )
        for file_index, (indices, weight) in enumerate(zip(indices_by_file, weights, strict=True)):
            if weight > 0 and not indices:
                raise DataError(
                    f"data.dataset_weights[{file_index}]={weight}, but that file has no usable rows"
                )
        total = float(sum(weights))
        self.indices_by_file = [list(indices) for indices in indices_by_file]
        self.shares = [weight / total for weight in weights]
        self.shuffle = shuffle
        self.seed = seed
        self.name = f"mixture {[round(share, 6) for share in self.shares]} with seed {seed}"

    def epoch_order(self, epoch: int, num_rows: int) -> Iterator[int]:
        counts = [0] * len(self.indices_by_file)
        order = []  # file index of each draw, the same in every epoch
        for num_draws in range(1, num_rows + 1):
            pairs = zip(self.shares, counts, strict=True)
            deficits = [share * num_draws - count for share, count in pairs]
            file_index = deficits.index(max(deficits))
            counts[file_index] += 1
            order.append(file_index)
        draws = [self._draws_from(index, epoch * count) for index, count in enumerate(counts)]
        return (next(draws[file_index]) for file_index in order)

    def _draws_from(self, file_index: int, start: int) -> Iterator[int]:
        """Yields row indices of one file endlessly; `start` rows of the file were drawn before."""
        pass_number, offset = divmod(start, max(len(self.indices_by_file[file_index]), 1))
        while True:
            indices = self.indices_by_file[file_index]
            if self.shuffle:
                indices = permutation(indices, f"mixture:{self.seed}:{file_index}:{pass_number}")
            yield from indices[offset:]
            pass_number, offset = pass_number + 1, 0


class AbstractSampler(ABC):
    """Base class of a user's sampler (data.sampler.class_path); each `iter` yields one epoch.

    On resume, the loader replays the draws of a sampler without state; `set_epoch(n)`, if defined,
    is called before each epoch. A sampler whose order depends on `update` must define
    `state_dict()`, which returns plain values, and `load_state_dict(state)`, after which `iter`
    yields the rest of the epoch.
    """

    def __init__(self, data_source: Sized, data_config: DataConfig) -> None:
        self.data_source = data_source
        self.data_config = data_config

    @abstractmethod
    def __iter__(self) -> Iterator[int]: ...

    def __len__(self) -> int:
        return len(self.data_source)


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that each finished batch updates; column `dataset_index` has the row indices."""

    @abstractmethod
    def update(self, batch: DataProto) -> None:
        """Updates the sampler with the columns of a finished batch."""


Sampler: TypeAlias = MixtureSampler | AbstractSampler


class PromptLoader:
    """Yields batches epoch after epoch; `first_epoch()` yields only the first epoch's batches."""

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
        self._order_name = str(getattr(self.sampler, "name", type(self.sampler).__qualname__))
        self._past_epoch_sizes: list[int] = []
        self._draw_counts: Counter[int]  # draws of each row in this epoch
        self._indices: Iterator[int] | None  # None at the start and the end of an epoch
        self._start_epoch(0)
        if hasattr(self.sampler, "update") and not isinstance(sampler, Stateful):
            logger.warning(
                "%s is updated by batches but has no state_dict(): a resumed run will not draw the"
                " rows that an uninterrupted run would",
                self._order_name,
            )

    @property
    def batches_per_epoch(self) -> int:
        num_rows = self._epoch_size
        return num_rows // self.batch_size if self.drop_last else -(-num_rows // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.next_batch()

    def next_batch(self) -> Batch:
        """Returns the next batch; starts a new epoch if the current one is exhausted."""
        if self._is_epoch_over():
            self._past_epoch_sizes.append(self._epoch_size)
            self._start_epoch(self.epoch + 1)
        if self._indices is None:
            # A sampler that was restored at an epoch's end may first yield the empty rest of the epoch.
            indices = self._iterate_epoch(self.epoch)
            if (first := next(indices, None)) is not None:
                self._indices = chain([first], indices)
            else:
                self._indices = self._iterate_epoch(self.epoch)
        size = min(self.batch_size, self._epoch_size - self._num_drawn)
        batch_indices = [int(index) for index in islice(self._indices, size)]
        if len(batch_indices) < size:
            raise DataError(
                f"the sampler {self._order_name} ended after"
                f" {self._num_drawn + len(batch_indices)} rows, but its length is"
                f" {self._epoch_size}"
            )
        batch = self._collate(batch_indices, self.epoch, self._draw_counts)
        self._num_drawn += size
        if self._is_epoch_over():
            self._exhaust_sampler()
        return batch

    def first_epoch(self) -> Iterator[Batch]:
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
        callback = getattr(self.dataset, "on_batch_end", None)
        rows = callback(batch) if callback is not None else None
        if not rows:
            return 0
        if isinstance(self.sampler, MixtureSampler):
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
        sampler = self.sampler if isinstance(self.sampler, Stateful) else None
        return {
            "version": STATE_VERSION,
            "order": self._order_name,
            "epoch": self.epoch,
            "drawn": self._num_drawn,
            "past": list(self._past_epoch_sizes),
            "epoch_rows": self._epoch_size,
            "counts": None if sampler is None else sorted(self._draw_counts.items()),
            "sampler": None if sampler is None else sampler.state_dict(),
            "dataset": self.dataset.state_dict() if isinstance(self.dataset, Stateful) else None,
        }

    def load_state_dict(self, state: Settings) -> None:
        """Continues from a state, which a loader with another batch size may have saved."""
        if state["version"] != STATE_VERSION:
            raise DataError(f"loader state has version {state['version']}, not {STATE_VERSION}")
        if state["order"] != self._order_name:
            raise DataError(
                f"the row order of the checkpoint is {state['order']}, of this run"
                f" {self._order_name}; keep data.shuffle, data.seed, data.dataset_weights and"
                " data.sampler as they were"
            )
        if state["dataset"] is not None and isinstance(self.dataset, Stateful):
            self.dataset.load_state_dict(state["dataset"])
        self.epoch = state["epoch"]
        self._num_drawn = state["drawn"]
        self._past_epoch_sizes = list(state["past"])
        self._epoch_size = state["epoch_rows"]
        if state["sampler"] is not None and isinstance(self.sampler, Stateful):
            self.sampler.load_state_dict(state["sampler"])
            self._draw_counts = Counter(dict(state["counts"] or ()))
            self._indices = None if self._is_epoch_over() else self._iterate_epoch(self.epoch)
            return
        # Replay the draws without reading rows. Built-in orders need only the current epoch.
        if not isinstance(self.sampler, AllRows | MixtureSampler):
            for epoch, num_rows in enumerate(self._past_epoch_sizes):
                _exhaust(self._iterate_epoch(epoch), num_rows)
        self._indices = self._iterate_epoch(self.epoch)
        self._draw_counts = Counter(islice(self._indices, self._num_drawn))
        if self._is_epoch_over():
            self._exhaust_sampler()

    def _iterate_epoch(self, epoch: int) -> Iterator[int]:
        if isinstance(self.sampler, AllRows | MixtureSampler):
            return iter(self.sampler.epoch_order(epoch, self._epoch_size))
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        return iter(self.sampler)

    def _is_epoch_over(self) -> bool:
        num_remaining = self._epoch_size - self._num_drawn
        return num_remaining <= 0 or (self.drop_last and num_remaining < self.batch_size)

    def _start_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._num_drawn = 0
        self._draw_counts = Counter()
        self._indices = None
        if isinstance(self.sampler, AllRows | MixtureSampler):
            self._epoch_size = len(self.dataset)
        else:
            self._epoch_size = len(self.sampler)
        if self.batch_size < 1:
            raise DataError(f"the batch size is {self.batch_size}; it must be at least 1")
        if self._epoch_size == 0:
            raise DataError(f"the sampler {self._order_name} or the data set has no rows")
        if self.batches_per_epoch == 0:
            raise DataError(
                f"the data set has {self._epoch_size} rows, fewer than one batch of"
                f" {self.batch_size} (data.train_batch_size); use at most {self._epoch_size}"
            )

    def _exhaust_sampler(self) -> None:
        """Exhausts the sampler's iterator, so that the sampler is in its state at an epoch's end."""
        if self._indices is not None:
            _exhaust(self._indices, self._epoch_size - self._num_drawn)
        self._indices = None

    def _collate(self, indices: Sequence[int], epoch: int, counts: Counter[int]) -> Batch:
        """Loads the batch of these rows; adds their draws to `counts`, from which uids are made."""
        index_uids = []
        for index in indices:
            name, number = type(self.dataset).__qualname__, index
            if hasattr(self.dataset, "key"):
                name, number = self.dataset.key(index)
            index_uids.append((index, row_uid(str(name), int(number), epoch, counts[index])))
            counts[index] += 1
        return self.load_batch(index_uids)

    def load_batch(self, index_uids: Sequence[tuple[int, str]]) -> Batch:
        """Returns the batch of these (row index, uid) pairs."""
        return collate_fn(
            [{**self.dataset[i], "uid": uid, "dataset_index": i} for i, uid in index_uids]
        )


def _exhaust(indices: Iterator[int], num_remaining: int) -> None:
    deque(islice(indices, num_remaining + 1), maxlen=0)  # +1: a generator ends after its last yield
