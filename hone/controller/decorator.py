"""`@register` and the dispatch modes, which define how the training loop calls a worker's method.

A dispatch mode splits the arguments over the ranks and joins the results. An execute mode selects
the ranks that run the method.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TypeVar

from tensordict import TensorDict

from hone.controller.contract import (
    DEFAULT_MESH,
    SPEC_ATTRIBUTE,
    ArgumentsPerRank,
    Batch,
    CollectFn,
    DispatchFn,
    DispatchMode,
    Execute,
    MethodSpec,
    WorkerGroupLike,
)
from hone.controller.dispatch import (
    as_list,
    broadcast,
    concat_batches,
    dispatch_nd_compute_dataproto,
    scatter,
)
from hone.protocol import DataProto
from hone.suggestions import suggestion
from hone.types import Function

_Method = TypeVar("_Method", bound=Function)
_T = TypeVar("_T")


def refuse_dispatch(group: WorkerGroupLike, *args: _T, **kwargs: _T) -> ArgumentsPerRank[_T]:
    """Raises RuntimeError: the rollout worker itself calls a method with this mode."""
    raise RuntimeError(
        "a method registered with Dispatch.DIRECT_ROLLOUT_METHOD is called inside the rollout "
        "worker, not through its group"
    )


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
    """Looks up `Dispatch.NAME`, so that modes of `register_dispatch_mode` are attributes too."""

    def __getattr__(cls, name: str) -> DispatchMode:
        if name in _MODES:
            return _MODES[name]
        hint = suggestion(name, _MODES)
        raise AttributeError(f"no dispatch mode {name!r}.{hint} There are {sorted(_MODES)}")

    def __iter__(cls) -> Iterator[DispatchMode]:
        return iter(list(_MODES.values()))

    def __contains__(cls, mode: object) -> bool:
        return mode in _MODES.values()


class Dispatch(metaclass=_DispatchNames):
    """The dispatch modes by name: `Dispatch.ONE_TO_ALL`."""


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
        setattr(method, SPEC_ATTRIBUTE, spec)
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
    return getattr(method, SPEC_ATTRIBUTE, None)


def registered_methods(cls: type) -> dict[str, MethodSpec]:
    """Returns the spec of each registered method; an unregistered override has the base method's spec."""
    specs: dict[str, MethodSpec] = {}
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            if (spec := method_spec(member)) is not None:
                specs[name] = spec
    return specs
