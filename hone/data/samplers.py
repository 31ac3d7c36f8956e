"""Samplers: file order, shuffled, mixed by weights, or defined by the user."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from hone.config.data import DataConfig
from hone.data.rows import DataError
from hone.types import Fields, Settings

if TYPE_CHECKING:
    from hone.protocol import DataProto


class Ordered:
    """Yields rows in the order of the files."""

    name = "order of the files"

    def epoch_order(self, epoch: int, rows: int) -> Iterator[int]:
        return iter(range(rows))


class Shuffled:
    """Yields a new permutation of all rows per epoch, determined by the seed."""

    def __init__(self, seed: int | None) -> None:
        self.seed = seed
        self.name = f"shuffle with seed {seed}"

    def epoch_order(self, epoch: int, rows: int) -> Iterator[int]:
        return iter(permutation(range(rows), f"epoch:{self.seed}:{epoch}"))


class Mixture:
    """Draws rows from several datasets in given proportions.

    Each draw takes the dataset that is furthest behind its share. Each row of a dataset is drawn
    once before any is repeated; an exhausted dataset starts over with a new permutation.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        weights: Sequence[float],
        *,
        shuffle: bool,
        seed: int | None,
    ) -> None:
        if len(groups) != len(weights):
            raise DataError(
                f"data.dataset_weights has {len(weights)} numbers for {len(groups)} data files;"
                " give one weight per file of data.train_files"
            )
        if any(weight < 0 for weight in weights) or sum(weights) <= 0:
            raise DataError(
                f"data.dataset_weights={list(weights)} has a negative or no positive value"
            )
        for number, (group, weight) in enumerate(zip(groups, weights, strict=True)):
            if weight > 0 and not group:
                raise DataError(
                    f"data.dataset_weights[{number}]={weight}, but that file has no usable rows"
                )
        total = float(sum(weights))
        self.groups = [list(group) for group in groups]
        self.shares = [weight / total for weight in weights]
        self.shuffle = shuffle
        self.seed = seed
        self.name = f"mixture {[round(share, 6) for share in self.shares]} with seed {seed}"

    def epoch_order(self, epoch: int, rows: int) -> Iterator[int]:
        counts = [0] * len(self.groups)
        order = []  # dataset index of each draw, the same in every epoch
        for k in range(1, rows + 1):
            deficits = [share * k - n for share, n in zip(self.shares, counts, strict=True)]
            number = deficits.index(max(deficits))
            counts[number] += 1
            order.append(number)
        sources = [self._rows_from(number, epoch * count) for number, count in enumerate(counts)]
        return (next(sources[number]) for number in order)

    def _rows_from(self, number: int, start: int) -> Iterator[int]:
        """Yields the rows of one dataset endlessly, from its `start`-th draw in the run on."""
        pass_number, offset = divmod(start, max(len(self.groups[number]), 1))
        while True:
            group = self.groups[number]
            if self.shuffle:
                group = permutation(group, f"mixture:{self.seed}:{number}:{pass_number}")
            yield from group[offset:]
            pass_number, offset = pass_number + 1, 0


def permutation(values: Sequence[int], seed: str) -> list[int]:
    """Returns a shuffled copy; a string seed is stable across Python versions."""
    copy = list(values)
    random.Random(seed).shuffle(copy)
    return copy


@runtime_checkable
class Stateful(Protocol):
    """A sampler, dataset or generator whose state, in plain values, is saved in the checkpoint."""

    def state_dict(self) -> Fields: ...

    def load_state_dict(self, state: Settings) -> None: ...


class UserSampler(Iterable[int], Sized, Protocol):
    """The interface of a user's sampler."""


Sampler: TypeAlias = Ordered | Shuffled | Mixture | UserSampler


class AbstractSampler(ABC):
    """Base class of a user's sampler (data.sampler.class_path); one `iter` is one epoch.

    On resume, the loader replays a sampler without state; `set_epoch(n)`, if defined, is called
    before each epoch. A sampler whose order depends on `update` must define `state_dict()`, which
    returns plain values, and `load_state_dict(state)`, after which `iter` yields the rest
    of the epoch.
    """

    def __init__(self, data_source: Sized, data_config: DataConfig) -> None:
        self.data_source = data_source
        self.data_config = data_config

    @abstractmethod
    def __iter__(self) -> Iterator[int]: ...

    def __len__(self) -> int:
        return len(self.data_source)


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that is updated with each finished batch; `dataset_index` has its row indices."""

    @abstractmethod
    def update(self, batch: DataProto) -> None:
        """Updates the sampler with the columns of a finished batch."""
