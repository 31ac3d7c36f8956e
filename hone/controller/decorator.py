"""`@register` and the dispatch modes, which define how the training loop calls a worker's method.

A dispatch mode splits the arguments over the ranks and joins the results. An execute mode selects
the ranks that run the method.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeAlias, TypeGuard, TypeVar

from tensordict import TensorDict

from hone.protocol import DataProto, DataProtoFuture, split_padded
from hone.protocol.tensordicts import concat_tensordict
from hone.suggestions import suggestion
from hone.types import Function

_SPEC_ATTRIBUTE = "hone_method_spec"
_Method = TypeVar("_Method", bound=Function)
_S = TypeVar("_S")
_T = TypeVar("_T")

DEFAULT_MESH = ""
"""The name of the default mesh. In a worker without an engine, each rank is a data-parallel slot."""


@dataclass(frozen=True)
class TensorDictPayload:
    """A TensorDict as an argument or result: pickled as a DataProto, unpickled as a TensorDict."""

    batch: DataProto

    def __reduce__(self) -> tuple[Callable[[DataProto], TensorDict], tuple[DataProto]]:
        return DataProto.to_tensordict, (self.batch,)


@dataclass(frozen=True)
class Mesh:
    """The data-parallel slot of each rank on a mesh, and whether the rank's result is collected."""

    dp_ranks: tuple[int, ...]
    """The slot of each rank."""
    is_collect: tuple[bool, ...]
    """Whether the result of each rank is collected."""

    @property
    def dp_size(self) -> int:
        return max(self.dp_ranks) + 1

    @property
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


Batch: TypeAlias = DataProto | DataProtoFuture | TensorDictPayload
ArgumentsPerRank: TypeAlias = tuple[tuple[list[_T], ...], dict[str, list[_T]]]
"""Positional and keyword arguments, each as a list with one entry per rank."""
DispatchFn = Callable[..., ArgumentsPerRank[Any]]
"""Maps (worker group, *args, **kwargs) to `ArgumentsPerRank`."""
CollectFn = Callable[[WorkerGroupLike, list[Any]], Any]
"""Maps (worker group, results in rank order) to the caller's result."""


def is_tensordict_batch(value: object) -> TypeGuard[TensorDict]:
    """Whether a value is a TensorDict with a batch dimension."""
    return isinstance(value, TensorDict) and bool(value.batch_size)


def _map_arguments(
    split: Callable[[_S], list[_T]], args: tuple[_S, ...], kwargs: dict[str, _S]
) -> ArgumentsPerRank[_T]:
    """Applies `split`, which returns one entry per rank, to every argument."""
    return tuple(split(value) for value in args), {key: split(kwargs[key]) for key in kwargs}


def broadcast(group: WorkerGroupLike, *args: _T, **kwargs: _T) -> ArgumentsPerRank[_T]:
    """Sends the same arguments to every rank."""
    return _map_arguments(lambda value: [value] * group.world_size, args, kwargs)


def scatter(
    group: WorkerGroupLike, *args: Sequence[_T], **kwargs: Sequence[_T]
) -> ArgumentsPerRank[_T]:
    """Sends each rank its own entry; every argument is a list with one entry per rank."""

    for value in (*args, *kwargs.values()):
        is_list = isinstance(value, list | tuple)
        if not is_list or len(value) != group.world_size:
            content = f"{len(value)} entries" if is_list else repr(type(value))
            raise ValueError(
                f"this method takes lists with one entry for each of {group.world_size} ranks; "
                f"got {content}; register it with Dispatch.ONE_TO_ALL to send all ranks the same value"
            )
    return _map_arguments(list, args, kwargs)


def refuse_dispatch(group: WorkerGroupLike, *args: _T, **kwargs: _T) -> ArgumentsPerRank[_T]:
    """Raises RuntimeError: the rollout worker itself calls a method with this mode."""
    raise RuntimeError(
        "a method registered with Dispatch.DIRECT_ROLLOUT_METHOD is called inside the rollout "
        "worker, not through its group"
    )


def dispatch_nd_compute_dataproto(
    mesh_name: str, group: WorkerGroupLike, *args: _T, **kwargs: _T
) -> ArgumentsPerRank[_T | Batch]:
    """Splits batches over the data-parallel slots of a mesh and sends other arguments to all ranks.

    The ranks of one slot get the same rows. The column `padded_row` marks the rows added as padding.
    """
    mesh = group.mesh(mesh_name)
    if not any(
        isinstance(value, DataProto | DataProtoFuture) or is_tensordict_batch(value)
        for value in (*args, *kwargs.values())
    ):
        raise TypeError(
            "this method splits a DataProto or a TensorDict over its ranks, and no argument is one"
        )

    def split(value: _T) -> list[_T | Batch]:
        parts: Sequence[Batch]
        if isinstance(value, DataProto):
            # A single slot also gets a batch of its own, because the worker may change its columns.
            parts = split_padded(value, mesh.dp_size) if mesh.dp_size > 1 else [value.select()]
        elif is_tensordict_batch(value):
            batch = DataProto.from_tensordict(value)
            parts = [TensorDictPayload(part) for part in split_padded(batch, mesh.dp_size)]
        elif isinstance(value, DataProtoFuture):
            parts = value.split_padded(mesh.dp_size)
        else:
            return [value] * len(mesh.dp_ranks)
        return [parts[slot] for slot in mesh.dp_ranks]

    return _map_arguments(split, args, kwargs)


split_batches = functools.partial(dispatch_nd_compute_dataproto, DEFAULT_MESH)
"""Splits batches over the slots of the default mesh."""


def split_after_func(
    group: WorkerGroupLike, *args: _T, **kwargs: _T
) -> ArgumentsPerRank[_T | Batch]:
    """Sends the first argument, a function, to all ranks; splits the rest like `split_batches`."""
    if not args or not callable(args[0]):
        raise TypeError(
            "the first argument of this method must be the function that each rank runs"
        )
    split_args, split_kwargs = split_batches(group, *args[1:], **kwargs)
    return ([args[0]] * group.world_size, *split_args), split_kwargs


def collect_nd_compute_dataproto(
    mesh_name: str, group: WorkerGroupLike, results: list[DataProto]
) -> DataProto | TensorDict:
    """Concatenates the batches of the collecting ranks in slot order."""
    return concat_batches(group, [results[rank] for rank in group.mesh(mesh_name).collect_ranks])


def as_list(group: WorkerGroupLike, results: list[_T]) -> list[_T]:
    """Returns the results in rank order."""
    return list(results)


def concat_batches(group: WorkerGroupLike, results: list[Any]) -> DataProto | TensorDict:
    """Concatenates the results; each must be a batch."""
    if all(is_tensordict_batch(result) for result in results):
        return concat_tensordict(results)
    for rank, result in enumerate(results):
        if not isinstance(result, DataProto):
            raise TypeError(
                f"rank {rank} returned a {type(result).__name__}, which cannot be concatenated; "
                "return a DataProto, or register the method with Dispatch.DP_COMPUTE_METRIC"
            )
    return DataProto.concat(results)


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


_MODES: dict[str, DispatchMode] = {
    mode.name: mode
    for mode in (
        DispatchMode("RANK_ZERO", broadcast, as_list, rank_zero_only=True),
        DispatchMode("ONE_TO_ALL", broadcast, as_list),
        DispatchMode("ALL_TO_ALL", scatter, as_list),
        DispatchMode("DP_COMPUTE", scatter, as_list),
        DispatchMode("DP_COMPUTE_PROTO", split_batches, concat_batches, collects_per_slot=True),
        DispatchMode(
            "DP_COMPUTE_PROTO_WITH_FUNC", split_after_func, concat_batches, collects_per_slot=True
        ),
        DispatchMode("DP_COMPUTE_METRIC", split_batches, as_list, collects_per_slot=True),
        DispatchMode("DIRECT_ROLLOUT_METHOD", refuse_dispatch, as_list),
    )
}


class _DispatchNames(type):
    """Looks up `Dispatch.NAME`, so that user modes are accessed like built-in ones."""

    def __getattr__(cls, name: str) -> DispatchMode:
        if name in _MODES:
            return _MODES[name]
        hint = suggestion(name, _MODES)
        raise AttributeError(f"no dispatch mode {name!r}.{hint} There are {sorted(_MODES)}")


class Dispatch(metaclass=_DispatchNames):
    """The dispatch modes by name: `Dispatch.ONE_TO_ALL`."""


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


def register(
    dispatch_mode: DispatchMode | dict[str, Function] | None = None,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[_Method], _Method]:
    """Makes a worker's method callable on its worker group, by default with Dispatch.ALL_TO_ALL."""
    mode = _MODES["ALL_TO_ALL"] if dispatch_mode is None else dispatch_mode
    if isinstance(mode, dict):
        if missing := {"dispatch_fn", "collect_fn"} - mode.keys():
            raise ValueError(f"the dispatch_mode dict has no {sorted(missing)}")
        mode = DispatchMode("custom", mode["dispatch_fn"], mode["collect_fn"])
    if not isinstance(mode, DispatchMode):
        raise TypeError(
            f"dispatch_mode={mode!r} is a {type(mode).__name__}; use Dispatch.<NAME>, or a dict "
            "with dispatch_fn and collect_fn"
        )
    if not isinstance(execute_mode, Execute):
        raise TypeError(f"execute_mode={execute_mode!r}: use Execute.ALL or Execute.RANK_ZERO")
    spec = MethodSpec(mode, execute_mode, blocking, materialize_futures)

    def set_spec(method: _Method) -> _Method:
        setattr(method, _SPEC_ATTRIBUTE, spec)
        return method

    return set_spec


def register_dispatch_mode(
    name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn
) -> DispatchMode:
    """Adds a custom dispatch mode, available as `Dispatch.<name>`."""
    if name in _MODES:
        raise ValueError(f"dispatch mode {name!r} exists; replace it with update_dispatch_mode")
    if not name.isidentifier():
        raise ValueError(f"the name of a dispatch mode must be an identifier, not {name!r}")
    _MODES[name] = DispatchMode(name, dispatch_fn, collect_fn)
    return _MODES[name]


def update_dispatch_mode(
    mode: DispatchMode | str, dispatch_fn: DispatchFn, collect_fn: CollectFn
) -> DispatchMode:
    """Replaces a mode's functions; methods that are already registered keep the old ones."""
    name = mode.name if isinstance(mode, DispatchMode) else mode
    if name not in _MODES:
        raise ValueError(f"no dispatch mode {name!r}; add it with register_dispatch_mode")
    _MODES[name] = DispatchMode(name, dispatch_fn, collect_fn, _MODES[name].rank_zero_only)
    return _MODES[name]


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> DispatchMode:
    """Returns a mode that splits over the data-parallel slots of the mesh `mesh_name`.

    All ranks of a slot get the same part; the result of one rank per slot is collected.
    """
    return DispatchMode(
        f"ND_COMPUTE_PROTO({mesh_name})",
        functools.partial(dispatch_nd_compute_dataproto, mesh_name),
        functools.partial(collect_nd_compute_dataproto, mesh_name),
    )


def method_spec(method: Function) -> MethodSpec | None:
    """Returns how a method was registered, or None if it was not."""
    return getattr(method, _SPEC_ATTRIBUTE, None)


def registered_methods(cls: type) -> dict[str, MethodSpec]:
    """Returns the spec of each registered method; an unregistered override has the base method's spec."""
    specs: dict[str, MethodSpec] = {}
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            if (spec := method_spec(member)) is not None:
                specs[name] = spec
    return specs
