"""The types of a call on a worker group: mesh, dispatch mode, arguments per rank, and executor."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from tensordict import TensorDict

from hone.protocol import DataProto, DataProtoFuture
from hone.types import Settings

T = TypeVar("T")
Handle = TypeVar("Handle")
"""The type of the handle that `submit` returns."""

DEFAULT_MESH = ""
"""The name of the default mesh. In a worker without an engine, each rank is a data-parallel slot."""
SPEC_ATTRIBUTE = "hone_method_spec"
"""The attribute of a registered method that has its `MethodSpec`."""


@dataclass(frozen=True)
class Mesh:
    """The data-parallel slot of each rank on a mesh, and whether the rank's result is collected."""

    dp_ranks: tuple[int, ...]
    """The slot of each rank."""
    is_collect: tuple[bool, ...]
    """Whether the result of each rank is collected."""

    @functools.cached_property
    def dp_size(self) -> int:
        return max(self.dp_ranks) + 1

    @functools.cached_property
    def collect_ranks(self) -> list[int]:
        """The ranks whose results are collected, one per slot, in slot order."""
        ranks = [rank for rank, is_collect in enumerate(self.is_collect) if is_collect]
        return sorted(ranks, key=lambda rank: self.dp_ranks[rank])

    def check(self, name: str) -> None:
        """Raises ValueError unless exactly one rank per slot is collected."""
        slots = [self.dp_ranks[rank] for rank in self.collect_ranks]
        if slots != list(range(self.dp_size)):
            raise ValueError(
                f"mesh {name!r}: each of {self.dp_size} data-parallel slots needs exactly one rank "
                f"that collects; the collecting ranks are in slots {slots}"
            )


class WorkerGroupLike(Protocol):
    """The interface of a worker group for dispatch and collect functions."""

    @property
    def world_size(self) -> int: ...

    def mesh(self, name: str) -> Mesh:
        """Returns the slots of the ranks on the mesh `name`."""


@dataclass(frozen=True)
class GroupView:
    """The picklable part of a worker group, for the collect function of a future."""

    world_size: int
    meshes: dict[str, Mesh] = field(default_factory=dict)

    def mesh(self, name: str) -> Mesh:
        return self.meshes[name]


@dataclass(frozen=True)
class Call:
    """One method call on one rank."""

    role: str
    """The role of the colocated worker; empty if there is only one worker."""
    method: str
    args: tuple[Any, ...] = ()
    kwargs: Settings = field(default_factory=dict)


class Executor(ABC, Generic[Handle]):
    """Runs method calls on the ranks of a worker group."""

    world_size: int

    @abstractmethod
    def submit(self, rank: int, call: Call) -> Handle:
        """Starts a call and returns a handle immediately."""

    @abstractmethod
    def resolver(self, role: str, method: str) -> Callable[[Sequence[Handle]], list[Any]]:
        """Returns a picklable function that waits for handles and returns the results of their calls.

        The messages of its errors contain `role` and `method`.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Stops all ranks and releases their resources; a second call does nothing."""


@dataclass(frozen=True)
class TensorDictPayload:
    """A TensorDict as an argument or result: pickled as a DataProto, unpickled as a TensorDict."""

    batch: DataProto

    def __reduce__(self) -> tuple[Callable[[DataProto], TensorDict], tuple[DataProto]]:
        return DataProto.to_tensordict, (self.batch,)


Batch: TypeAlias = DataProto | DataProtoFuture | TensorDictPayload
ArgumentsPerRank: TypeAlias = tuple[tuple[list[T], ...], dict[str, list[T]]]
"""Positional and keyword arguments, each as a list with one entry per rank."""
DispatchFn = Callable[..., ArgumentsPerRank[Any]]
"""Maps (worker group, *args, **kwargs) to `ArgumentsPerRank`."""
CollectFn = Callable[[WorkerGroupLike, list[Any]], Any]
"""Maps (worker group, results in rank order) to the caller's result."""


@dataclass(frozen=True)
class DispatchMode:
    """How the arguments of a call are split over the ranks, and how their results are joined."""

    name: str
    dispatch_fn: DispatchFn
    collect_fn: CollectFn
    rank_zero_only: bool = False
    collects_per_slot: bool = False
    """Whether `collect_fn` gets one result per data-parallel slot, not one per rank."""

    def __repr__(self) -> str:
        return f"Dispatch.{self.name}"


class Execute(Enum):
    """Which ranks run a method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class MethodSpec:
    """How a registered method is called."""

    dispatch_mode: DispatchMode
    execute_mode: Execute = Execute.ALL
    blocking: bool = True
    """If False, the call returns a DataProtoFuture immediately."""
    materialize_futures: bool = True
    """Whether the worker resolves futures among the arguments before the method runs."""
