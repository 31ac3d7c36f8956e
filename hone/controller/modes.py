"""The functions behind the dispatch modes: split arguments over ranks, join results.

Each splitting function returns positional and keyword arguments as lists with one entry a rank.
Leaves out the calls themselves, and unpadding: a worker's host drops the rows added here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeGuard, TypeVar

from tensordict import TensorDict

from hone.protocol import DataProto, DataProtoFuture, split_padded
from hone.protocol.tensordicts import concat_tensordict

_S = TypeVar("_S")
_T = TypeVar("_T")


@dataclass(frozen=True)
class TensorDictRows:
    """A TensorDict on its way to or from a worker: it is pickled as a DataProto and arrives as itself."""

    rows: DataProto

    def __reduce__(self) -> tuple[Callable[[DataProto], TensorDict], tuple[DataProto]]:
        return DataProto.to_tensordict, (self.rows,)


Batch: TypeAlias = DataProto | DataProtoFuture | TensorDictRows

PerRank: TypeAlias = tuple[tuple[list[_T], ...], dict[str, list[_T]]]
"""Positional and keyword arguments, each as a list with one entry per rank."""

DispatchFn = Callable[..., PerRank[Any]]
"""(worker group, *args, **kwargs) to `PerRank`."""


class Group(Protocol):
    """What dispatch and collect functions ask of a worker group."""

    @property
    def world_size(self) -> int: ...

    def mesh(self, name: str) -> Mesh:
        """Where each rank stands on a named mesh."""


CollectFn = Callable[[Group, list[Any]], Any]
"""(worker group, results in rank order) to what the caller gets."""

DATA_PARALLEL = ""
"""The mesh of a worker's own engine; without one every rank is a data-parallel slot of its own."""


@dataclass(frozen=True)
class Mesh:
    """Where each rank stands on a named mesh: its data-parallel slot, and whether it answers."""

    dp_ranks: tuple[int, ...]
    collects: tuple[bool, ...]

    @property
    def dp_size(self) -> int:
        return max(self.dp_ranks) + 1

    @property
    def answering(self) -> list[int]:
        """The rank that answers for each slot, in the slots' order."""
        ranks = [rank for rank, collects in enumerate(self.collects) if collects]
        return sorted(ranks, key=lambda rank: self.dp_ranks[rank])


def broadcast(group: Group, *args: _T, **kwargs: _T) -> PerRank[_T]:
    """Every rank gets the same arguments."""
    return _each(lambda value: [value] * group.world_size, args, kwargs)


def one_each(group: Group, *args: Sequence[_T], **kwargs: Sequence[_T]) -> PerRank[_T]:
    """Every argument is a list with one entry a rank."""

    def checked(value: Sequence[_T]) -> list[_T]:
        if not isinstance(value, list | tuple) or len(value) != group.world_size:
            got = f"{len(value)} entries" if isinstance(value, list | tuple) else repr(type(value))
            raise ValueError(
                f"this method takes lists with one entry for each of {group.world_size} ranks; "
                f"got {got}; register it with Dispatch.ONE_TO_ALL to send all ranks the same"
            )
        return list(value)

    return _each(checked, args, kwargs)


def split_batches(group: Group, *args: _T, **kwargs: _T) -> PerRank[_T | Batch]:
    """Batches are split over the data-parallel slots, evened out with marked rows; the ranks of one
    slot get the same rows, and other values go to all."""
    return dispatch_nd_compute_dataproto(DATA_PARALLEL, group, *args, **kwargs)


def split_after_func(group: Group, *args: _T, **kwargs: _T) -> PerRank[_T | Batch]:
    """The first argument is a function, sent to all; the rest as `split_batches`."""
    if not args or not callable(args[0]):
        raise TypeError("the first argument of this method is the function each rank runs")
    rest, named = split_batches(group, *args[1:], **kwargs)
    return ([args[0]] * group.world_size, *rest), named


def not_dispatched(group: Group, *args: _T, **kwargs: _T) -> PerRank[_T]:
    """Methods the rollout calls directly have no driver side."""
    raise RuntimeError(
        "a method registered with Dispatch.DIRECT_ROLLOUT_METHOD is called inside the rollout "
        "worker, not through its group"
    )


def dispatch_nd_compute_dataproto(
    mesh_name: str, group: Group, *args: _T, **kwargs: _T
) -> PerRank[_T | Batch]:
    """Batches are split over the data-parallel groups of a mesh."""
    mesh = group.mesh(mesh_name)
    return _split(args, kwargs, mesh.dp_size, mesh.dp_ranks)


def collect_nd_compute_dataproto(
    mesh_name: str, group: Group, results: list[DataProto]
) -> DataProto:
    """Results of the ranks that collect, one per data-parallel slot, in the slots' order."""
    mesh = group.mesh(mesh_name)
    return concat_batches(group, [results[rank] for rank in mesh.answering])


def as_list(group: Group, results: list[_T]) -> list[_T]:
    """What each rank returned, in rank order."""
    return list(results)


def has_rows(value: object) -> TypeGuard[TensorDict]:
    """Whether a value is a TensorDict with a batch dimension."""
    return isinstance(value, TensorDict) and bool(value.batch_size)


def concat_batches(group: Group, results: list[Any]) -> DataProto | TensorDict:
    """The slots' batches one below the other."""
    if all(has_rows(result) for result in results):
        return concat_tensordict(results)
    for rank, result in enumerate(results):
        if not isinstance(result, DataProto):
            raise TypeError(
                f"rank {rank} returned a {type(result).__name__}, and batches are to be joined; "
                "return a DataProto, or register the method with Dispatch.DP_COMPUTE_METRIC"
            )
    return DataProto.concat(results)


def _split(
    args: tuple[_T, ...], kwargs: dict[str, _T], parts: int, part_of_rank: Sequence[int]
) -> PerRank[_T | Batch]:
    values = [*args, *kwargs.values()]
    if not any(
        isinstance(value, DataProto | DataProtoFuture) or has_rows(value) for value in values
    ):
        raise TypeError(
            "this method splits a DataProto or a TensorDict over its ranks and got none among its "
            "arguments"
        )

    def cut(value: _T) -> list[_T | Batch]:
        pieces: Sequence[Batch]
        if isinstance(value, DataProto):
            pieces = split_padded(value, parts)
        elif has_rows(value):
            batch = DataProto.from_tensordict(value)
            pieces = [TensorDictRows(piece) for piece in split_padded(batch, parts)]
        elif isinstance(value, DataProtoFuture):
            pieces = value.split_padded(parts)
        else:
            return [value] * len(part_of_rank)
        return [pieces[part] for part in part_of_rank]

    return _each(cut, args, kwargs)


def _each(
    split: Callable[[_S], list[_T]], args: tuple[_S, ...], kwargs: dict[str, _S]
) -> PerRank[_T]:
    return tuple(split(value) for value in args), {key: split(kwargs[key]) for key in kwargs}
