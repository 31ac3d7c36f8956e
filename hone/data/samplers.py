"""In which order rows are drawn: by file, shuffled, mixed by weights, or by the user's own rule."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from hone.config.data import DataConfig
from hone.data.rows import DataError
from hone.types import Row, Settings

if TYPE_CHECKING:
    from hone.protocol import DataProto


class Ordered:
    """Rows in the order of the files."""

    name = "order of the files"

    def epoch_order(self, epoch: int, rows: int) -> Iterator[int]:
        return iter(range(rows))


class Shuffled:
    """A permutation of all rows, another one in each epoch, fixed by the seed."""

    def __init__(self, seed: int | None) -> None:
        self.seed = seed
        self.name = f"shuffle with seed {seed}"

    def epoch_order(self, epoch: int, rows: int) -> Iterator[int]:
        return iter(permutation(range(rows), f"epoch:{self.seed}:{epoch}"))


class Mixture:
    """Rows of several data sets in given proportions.

    Each draw takes the data set that is furthest behind its share, so that any k consecutive
    draws have within one row of weight·k from each. Inside a data set each row comes once before any
    comes again; a data set that is used up starts over with a new permutation.
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
                f"data.dataset_weights has {len(weights)} numbers for {len(groups)} data files; give"
                " one weight per file of data.train_files"
            )
        if any(weight < 0 for weight in weights) or sum(weights) <= 0:
            raise DataError(f"data.dataset_weights={list(weights)}: not negative, and not all zero")
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
        drawn = [0] * len(self.groups)
        order = []  # the data set of each draw, the same in every epoch
        for k in range(1, rows + 1):
            behind = [share * k - n for share, n in zip(self.shares, drawn, strict=True)]
            number = behind.index(max(behind))
            drawn[number] += 1
            order.append(number)
        sources = [self._rows_from(number, epoch * count) for number, count in enumerate(drawn)]
        return (next(sources[number]) for number in order)

    def _rows_from(self, number: int, start: int) -> Iterator[int]:
        """The rows of one data set, lap after lap, from the `start`-th draw of the run on."""
        lap, offset = divmod(start, max(len(self.groups[number]), 1))
        while True:
            group = self.groups[number]
            if self.shuffle:
                group = permutation(group, f"mixture:{self.seed}:{number}:{lap}")
            yield from group[offset:]
            lap, offset = lap + 1, 0


def permutation(values: Sequence[int], seed: str) -> list[int]:
    """A shuffled copy. `random.Random` with a string seed is stable across Python versions."""
    shuffled = list(values)
    random.Random(seed).shuffle(shuffled)
    return shuffled


@runtime_checkable
class Stateful(Protocol):
    """A sampler, data set or generator with state of plain values, which goes into the checkpoint."""

    def state_dict(self) -> Row: ...

    def load_state_dict(self, state: Settings) -> None: ...


class UserSampler(Iterable[int], Sized, Protocol):
    """The user's sampler as the loader sees it."""


Sampler: TypeAlias = Ordered | Shuffled | Mixture | UserSampler


class AbstractSampler(ABC):
    """A user's sampler (data.sampler.class_path, class_name): one pass of `iter` is one epoch.

    To resume exactly, either let every pass follow from the start alone (a seed, `set_epoch(n)`
    called before each pass where defined): the loader replays the passes. Or keep state:
    `state_dict()` of plain values and `load_state_dict(state)`, after which the next `iter` yields
    the rest of the epoch. A sampler with `update` that changes its order needs the second.
    """

    def __init__(self, data_source: Sized, data_config: DataConfig) -> None:
        self.data_source = data_source
        self.data_config = data_config

    @abstractmethod
    def __iter__(self) -> Iterator[int]: ...

    def __len__(self) -> int:
        return len(self.data_source)


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that learns from each finished batch; its rows are in column `dataset_index`."""

    @abstractmethod
    def update(self, batch: DataProto) -> None:
        """Read the scores, advantages or other columns of a finished batch."""
