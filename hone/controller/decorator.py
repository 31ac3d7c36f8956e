"""`@register`: how a worker's method is called from the loop as if there were one process.

A dispatch mode says how arguments are split over ranks and results joined; an execute mode says
which ranks run. Leaves out who runs them: that is a worker group's business.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from hone.controller import modes
from hone.controller.modes import (
    CollectFn,
    DispatchFn,
    collect_nd_compute_dataproto,
    dispatch_nd_compute_dataproto,
)
from hone.types import Function

__all__ = [
    "Dispatch",
    "DispatchMode",
    "Execute",
    "MethodSpec",
    "collect_nd_compute_dataproto",
    "dispatch_nd_compute_dataproto",
    "make_nd_compute_dataproto_dispatch_fn",
    "method_spec",
    "register",
    "register_dispatch_mode",
    "registered_methods",
    "update_dispatch_mode",
]

_SPEC_ATTRIBUTE = "hone_method_spec"
_Method = TypeVar("_Method", bound=Function)


@dataclass(frozen=True)
class DispatchMode:
    """One way to split arguments over ranks and to join what they return."""

    name: str
    dispatch_fn: DispatchFn
    collect_fn: CollectFn
    rank_zero_only: bool = False
    by_slot: bool = False
    """Arguments go to data-parallel slots (`split_batches`), and `collect_fn` gets one result of each."""

    def __repr__(self) -> str:
        return f"Dispatch.{self.name}"


class Execute(Enum):
    """Which ranks run a method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


_MODES: dict[str, DispatchMode] = {
    mode.name: mode
    for mode in (
        DispatchMode("RANK_ZERO", modes.broadcast, modes.as_list, rank_zero_only=True),
        DispatchMode("ONE_TO_ALL", modes.broadcast, modes.as_list),
        DispatchMode("ALL_TO_ALL", modes.one_each, modes.as_list),
        DispatchMode("DP_COMPUTE", modes.one_each, modes.as_list),
        DispatchMode("DP_COMPUTE_PROTO", modes.split_batches, modes.concat_batches, by_slot=True),
        DispatchMode(
            "DP_COMPUTE_PROTO_WITH_FUNC", modes.split_after_func, modes.concat_batches, by_slot=True
        ),
        DispatchMode("DP_COMPUTE_METRIC", modes.split_batches, modes.as_list, by_slot=True),
        DispatchMode("DIRECT_ROLLOUT_METHOD", modes.not_dispatched, modes.as_list),
    )
}


class _DispatchNames(type):
    """`Dispatch.NAME` looks the mode up, so that modes users add read like ours."""

    def __getattr__(cls, name: str) -> DispatchMode:
        if name in _MODES:
            return _MODES[name]
        close = difflib.get_close_matches(name, _MODES, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise AttributeError(f"no dispatch mode {name!r}.{hint} There are {sorted(_MODES)}")

    def __iter__(cls) -> Iterator[DispatchMode]:
        return iter(list(_MODES.values()))

    def __contains__(cls, mode: object) -> bool:
        return mode in _MODES.values()


class Dispatch(metaclass=_DispatchNames):
    """The dispatch modes by name: `Dispatch.ONE_TO_ALL`."""


@dataclass(frozen=True)
class MethodSpec:
    """How a registered method is called."""

    dispatch_mode: DispatchMode
    execute_mode: Execute = Execute.ALL
    blocking: bool = True
    """False: the call returns a DataProtoFuture at once."""
    materialize_futures: bool = True
    """Futures among the arguments are waited for in the worker, before the method runs."""


def register(
    dispatch_mode: DispatchMode | dict[str, Function] | None = None,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[_Method], _Method]:
    """Make a worker's method callable on its group; without a mode, Dispatch.ALL_TO_ALL."""
    mode = _as_mode(dispatch_mode if dispatch_mode is not None else _MODES["ALL_TO_ALL"])
    if not isinstance(execute_mode, Execute):
        raise TypeError(f"execute_mode={execute_mode!r}: use Execute.ALL or Execute.RANK_ZERO")
    spec = MethodSpec(mode, execute_mode, blocking, materialize_futures)

    def mark(method: _Method) -> _Method:
        setattr(method, _SPEC_ATTRIBUTE, spec)
        return method

    return mark


def register_dispatch_mode(
    name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn
) -> DispatchMode:
    """Add a dispatch mode of your own; it is then `Dispatch.<name>`."""
    if name in _MODES:
        raise ValueError(f"dispatch mode {name!r} exists; replace it with update_dispatch_mode")
    if not name.isidentifier():
        raise ValueError(f"a dispatch mode is named like a variable, not {name!r}")
    _MODES[name] = DispatchMode(name, dispatch_fn, collect_fn)
    return _MODES[name]


def update_dispatch_mode(
    mode: DispatchMode | str, dispatch_fn: DispatchFn, collect_fn: CollectFn
) -> DispatchMode:
    """Replace a mode's functions; methods registered before keep the old ones."""
    name = mode.name if isinstance(mode, DispatchMode) else mode
    if name not in _MODES:
        raise ValueError(f"no dispatch mode {name!r}; add it with register_dispatch_mode")
    _MODES[name] = DispatchMode(name, dispatch_fn, collect_fn, _MODES[name].rank_zero_only)
    return _MODES[name]


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> DispatchMode:
    """A mode for ranks that lie on a mesh of more than the data axis.

    The batch is split over the data-parallel groups that workers registered under `mesh_name`; all
    ranks of a group get the same part, and only those that said they collect answer.
    """
    return DispatchMode(
        f"ND_COMPUTE_PROTO({mesh_name})",
        functools.partial(dispatch_nd_compute_dataproto, mesh_name),
        functools.partial(collect_nd_compute_dataproto, mesh_name),
    )


def method_spec(method: Function) -> MethodSpec | None:
    """How a method was registered; None where it was not."""
    return getattr(method, _SPEC_ATTRIBUTE, None)


def registered_methods(cls: type) -> dict[str, MethodSpec]:
    """Every registered method of a class, by name; an override keeps the base's registration."""
    found: dict[str, MethodSpec] = {}
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            spec = method_spec(member)
            if spec is not None:
                found[name] = spec
    return found


def _as_mode(mode: DispatchMode | dict[str, Function]) -> DispatchMode:
    if isinstance(mode, DispatchMode):
        return mode
    if isinstance(mode, dict):
        missing = {"dispatch_fn", "collect_fn"} - mode.keys()
        if missing:
            raise ValueError(f"a dispatch mode given as a dict needs {sorted(missing)} too")
        return DispatchMode("custom", mode["dispatch_fn"], mode["collect_fn"])
    raise TypeError(
        f"dispatch_mode={mode!r} is a {type(mode).__name__}; use Dispatch.<NAME>, or a dict with "
        "dispatch_fn and collect_fn"
    )
