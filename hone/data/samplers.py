"""Samplers: all rows shuffled, several files mixed by weights, or a user's own order of row indices."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Sized
from typing import TYPE_CHECKING, TypeAlias

from hone.config.data import DataConfig
from hone.data.rows import DataError

if TYPE_CHECKING:
    from hone.protocol import DataProto


def permutation(values: Sequence[int], seed: str) -> list[int]:
    """Returns a shuffled copy; a string seed is stable across Python versions."""
    copy = list(values)
    random.Random(seed).shuffle(copy)
    return copy


class EpochOrder(ABC):
    """A built-in order of an epoch's rows; it depends only on the number of the epoch."""

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


class MixtureSampler(EpochOrder):
    """Draws rows from several data files in given proportions.

    Each draw takes the file that is furthest behind its share. The rows of a file are drawn once
    each, then again in a new permutation.
    """

    has_added_rows = False

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
        draws = [
            self._draws_from(file_index, epoch * count) for file_index, count in enumerate(counts)
        ]
        return (next(draws[file_index]) for file_index in order)

    def _draws_from(self, file_index: int, start: int) -> Iterator[int]:
        """Yields row indices of one file endlessly, after the first `start` draws of the file."""
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


Sampler: TypeAlias = EpochOrder | AbstractSampler
