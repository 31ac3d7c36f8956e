"""Loads batches of rows, epoch after epoch, in a seeded order that resumes exactly from a checkpoint.

`RowStore` holds the rows of the data files, a sampler orders them, and `PromptLoader` collates batches.
"""

from __future__ import annotations

import bisect
import hashlib
import logging
import random
from abc import ABC, abstractmethod
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from hone.data.rows import DataError
from hone.types import Fields, Row, Settings

if TYPE_CHECKING:
    import pyarrow as pa

    from hone.data.samplers import Sampler
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


class EpochOrder(ABC):
    """A built-in order of the rows of an epoch; it depends on the number of the epoch alone."""

    has_added_rows = True
    """Whether the order includes rows that the dataset adds during training."""

    @abstractmethod
    def epoch_order(self, epoch: int, num_rows: int) -> Iterator[int]:
        """Yields `num_rows` row indices."""


class AllRows(EpochOrder):
    """The default sampler: all rows in file order, or in a new permutation per epoch."""

    def __init__(self, *, shuffle: bool, seed: int | None) -> None:
        self.name = f"shuffle with seed {seed}" if shuffle else "order of the files"
        self._shuffle, self._seed = shuffle, seed

    def epoch_order(self, epoch: int, num_rows: int) -> Iterator[int]:
        rows = range(num_rows)
        return iter(permutation(rows, f"epoch:{self._seed}:{epoch}") if self._shuffle else rows)


@dataclass(frozen=True)
class FileRows:
    """The usable rows of one file; rows of an Arrow table become dicts when they are read."""

    path: str
    content: pa.Table | list[Row]
    row_numbers: Sequence[int]  # zero-based row numbers in the file; bad rows leave gaps
    fingerprint: str = ""  # hash of the file's content

    def __len__(self) -> int:
        return len(self.row_numbers)

    def __getitem__(self, index: int) -> Row:
        if isinstance(self.content, list):
            return self.content[index]
        return dict(self.content.slice(index, 1).to_pylist()[0])

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        """Yields all rows in order; `columns` selects the columns."""
        if isinstance(self.content, list):
            for row in self.content:
                yield row if columns is None else {n: row[n] for n in columns if n in row}
            return
        names = self.content.column_names
        table = self.content.select([name for name in columns or names if name in names])
        if not table.column_names:
            yield from ({} for _ in range(len(self)))
            return
        for batch in table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()

    def where(self, index: int) -> str:
        """Returns the file and number of a row, for messages."""
        return f"{self.path}, row {self.row_numbers[index]}"


class RowStore:
    """The rows of several files, indexed by position from the first file's first row."""

    def __init__(self, files: Sequence[FileRows]) -> None:
        self.files = list(files)
        self._file_starts = [0, *accumulate(map(len, self.files))]
        self._dataset_names: list[str] = []
        num_copies: Counter[str] = Counter()
        for file in self.files:
            # A file that is listed twice gets two names, so that uids are unique.
            suffix = f"#{num_copies[file.fingerprint]}" if num_copies[file.fingerprint] else ""
            self._dataset_names.append(file.fingerprint + suffix)
            num_copies[file.fingerprint] += 1

    def __len__(self) -> int:
        return self._file_starts[-1]

    def _locate(self, position: int) -> tuple[int, int]:
        """Returns (index of the file, index of the row in it)."""
        if not 0 <= position < len(self):
            raise IndexError(f"row {position} of {len(self)}")
        file_index = bisect.bisect_right(self._file_starts, position) - 1
        return file_index, position - self._file_starts[file_index]

    def __getitem__(self, position: int) -> Row:
        file_index, index = self._locate(position)
        return self.files[file_index][index]

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        return (row for file in self.files for row in file.scan(columns))

    def file_index_of(self, position: int) -> int:
        return self._locate(position)[0]

    def where(self, position: int) -> str:
        """Returns the file and number of a row, for messages."""
        file_index, index = self._locate(position)
        return self.files[file_index].where(index)

    def key(self, position: int) -> tuple[str, int]:
        """Returns (dataset name, row number in it), from which a uid is made."""
        file_index, index = self._locate(position)
        return self._dataset_names[file_index], int(self.files[file_index].row_numbers[index])

    @property
    def fingerprint(self) -> str:
        return hashlib.blake2b("\n".join(self._dataset_names).encode(), digest_size=16).hexdigest()

    def selection_fingerprint(self, positions: Sequence[int]) -> str:
        """Returns a hash of the file contents and of the positions in use."""
        content = self.fingerprint.encode() + array("q", positions).tobytes()
        return hashlib.blake2b(content, digest_size=16).hexdigest()


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
        if not isinstance(self.sampler, EpochOrder):
            for epoch, num_rows in enumerate(self._past_epoch_sizes):
                _exhaust(self._iterate_epoch(epoch), num_rows)
        self._indices = self._iterate_epoch(self.epoch)
        self._draw_counts = Counter(islice(self._indices, self._num_drawn))
        if self._is_epoch_over():
            self._exhaust_sampler()

    def _iterate_epoch(self, epoch: int) -> Iterator[int]:
        if isinstance(self.sampler, EpochOrder):
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
        if isinstance(self.sampler, EpochOrder):
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
