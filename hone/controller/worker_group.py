"""WorkerGroup, the object through which the training loop calls all ranks of a role.

Each registered method of the worker class becomes a group method that splits the arguments, calls
all ranks and joins the results. An Executor runs the ranks in this process (local.py) or as Ray
actors (ray.py).
"""

from __future__ import annotations

import functools
import operator
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import numpy as np
import torch

from hone.controller.colocated import ClassWithInitArgs, ColocatedClass
from hone.controller.decorator import DEFAULT_MESH, Execute, Mesh, MethodSpec, registered_methods
from hone.controller.resource_pool import Role
from hone.protocol import DataProtoFuture
from hone.suggestions import suggestion
from hone.types import Function, Settings

W = TypeVar("W", covariant=True)
"""The worker's class."""
Handle = TypeVar("Handle")
"""The type of the handle that `submit` returns."""
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Listener = Callable[[int, int], None]
"""Receives the number of ranks that have answered and the number of all ranks."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
_NUMBER_BYTES = 8
_NUMBER_TYPES = (int, float, np.number, type(None))
_TEXT_TYPES = (str, bytes, bytearray)
_SEQUENCE_TYPES = (list, tuple)
_TYPES_SENT_BY_NAME = (type, ModuleType)


@contextmanager
def on_wait_progress(listener: Listener) -> Iterator[None]:
    """Calls `listener` about once per second while the caller waits for ranks inside the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report_progress(answered_ranks: int, total_ranks: int) -> None:
    """Calls the listener, if there is one."""
    listener = _listener.get()
    if listener is not None:
        listener(answered_ranks, total_ranks)


@dataclass
class PhaseDeadlines:
    """The deadline of each phase: the larger of `floor_s` and `factor` times its longest completed run.

    A phase is a worker's method, or all agent loops of a batch.
    """

    floor_s: float
    """`trainer.phase_deadline_floor_s`."""
    factor: float
    """`trainer.phase_deadline_factor`."""
    longest_run_s: dict[str, float] = field(default_factory=dict)
    """The longest completed run of each phase."""

    def limit_s(self, phase: str) -> float:
        """Returns the deadline of the phase's next run."""
        return max(self.floor_s, self.factor * self.longest_run_s.get(phase, 0.0))

    def record(self, phase: str, seconds: float) -> None:
        """Records the duration of a completed run."""
        self.longest_run_s[phase] = max(seconds, self.longest_run_s.get(phase, 0.0))

    @contextmanager
    def timed(self, phase: str) -> Iterator[float]:
        """Yields the limit of this run and records its duration if it completes."""
        start_time = time.monotonic()
        yield self.limit_s(phase)
        self.record(phase, time.monotonic() - start_time)

    def advice(self, phase: str) -> str:
        """Returns the end of an error message: where the limit comes from and how to raise it."""
        longest_run_s = self.longest_run_s.get(phase)
        if longest_run_s is None or self.factor * longest_run_s <= self.floor_s:
            return "raise trainer.phase_deadline_floor_s if the work is that long"
        return (
            f"raise trainer.phase_deadline_factor (the limit is {self.factor:g} times the longest "
            f"run so far, {longest_run_s:.3g} s) if the work is that long"
        )


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
class GroupView:
    """The picklable part of a worker group, for the collect function of a future."""

    world_size: int
    meshes: dict[str, Mesh] = field(default_factory=dict)

    def mesh(self, name: str) -> Mesh:
        return self.meshes[name]


class WorkerGroup(Generic[W]):
    """Calls the ranks of one role.

    `group.method(…)` calls any registered method by its name. `call`, `call_all`, `call_each` and
    `begin` take the method itself, so that type checkers check its arguments and result.
    """

    def __init__(
        self, executor: Executor[Any], cls_with_init: ClassWithInitArgs, name: str, role: str = ""
    ) -> None:
        self._executor = executor
        self._role = role
        self._meshes: dict[str, Mesh] = {}
        self.name = name
        self.traffic: Counter[str] = Counter()
        """Payload bytes of arguments and results, by `role/method`."""
        self._methods: dict[str, Function] = {}
        self._specs: dict[str, MethodSpec] = {}
        self._group_by_role: dict[str, WorkerGroup[Any]] = {
            member_role: WorkerGroup(executor, member, member_role, member_role)
            for member_role, member in cls_with_init.members.items()
        }
        if isinstance(cls_with_init, ColocatedClass):
            for member_role, group in self._group_by_role.items():
                for name, method in group._methods.items():
                    self._methods[f"{member_role}_{name}"] = method
        else:
            self._specs = registered_methods(cls_with_init.cls)
            self._methods = {name: functools.partial(self._call, name) for name in self._specs}

    @property
    def world_size(self) -> int:
        return self._executor.world_size

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.world_size} ranks)"

    def __getattr__(self, name: str) -> Function:
        methods = self.__dict__.get("_methods", {})
        if name in methods:
            return methods[name]
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"worker group {self.__dict__.get('name', '')!r} has no method "
            f"{name!r}.{suggestion(name, methods)} Registered are {sorted(methods)}"
        )

    @property
    def data_parallel_size(self) -> int:
        """The number of data-parallel slots over which rows are split."""
        return self.mesh(DEFAULT_MESH).dp_size

    def mesh(self, name: str) -> Mesh:
        """Returns the slots of the ranks on the mesh `name`; the first call asks the ranks."""
        if name not in self._meshes:
            mesh = Mesh(*zip(*self.execute_all("mesh_slot", name), strict=True))
            mesh.check(name)
            self._meshes[name] = mesh
        return self._meshes[name]

    def call(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls a method and returns what its dispatch mode collects from the ranks."""
        result: R = self.__getattr__(method.__name__)(*args, **kwargs)
        return result

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        spec = self._specs[name]
        mode = spec.dispatch_mode
        split_args, split_kwargs = mode.dispatch_fn(self, *args, **kwargs)
        is_rank_zero_call = mode.rank_zero_only or spec.execute_mode is Execute.RANK_ZERO
        num_ranks = 1 if is_rank_zero_call else self.world_size
        for values in (*split_args, *split_kwargs.values()):
            if len(values) not in (num_ranks, self.world_size):
                raise ValueError(
                    f"{mode!r} split an argument of {self.name}.{name} into {len(values)} entries "
                    f"for {self.world_size} ranks; its dispatch function must return one per rank"
                )
        handles = []
        for rank in range(num_ranks):
            rank_args = tuple(values[rank] for values in split_args)
            rank_kwargs = {key: values[rank] for key, values in split_kwargs.items()}
            handles.append(self._submit(rank, Call(self._role, name, rank_args, rank_kwargs)))
        # A future may be resolved in another process, which has no worker group.
        group = self if spec.blocking else GroupView(self.world_size, dict(self._meshes))
        collect: Function = functools.partial(mode.collect_fn, group)
        if is_rank_zero_call:
            collect = operator.itemgetter(0)
        elif mode.collects_per_slot:
            collect = functools.partial(_collect_slots, collect, self.mesh(DEFAULT_MESH))
        collect = self._count_results(name, collect)
        resolve = self._executor.resolver(self.name, name)
        if spec.blocking:
            return collect(resolve(handles))
        return DataProtoFuture(collect, handles, resolve=resolve)

    def _submit(self, rank: int, call: Call) -> Any:
        """Counts the payload bytes of a call and starts it."""
        arguments = (*call.args, *call.kwargs.values())
        self.traffic[f"{self.name}/{call.method}"] += sum(map(payload_bytes, arguments))
        return self._executor.submit(rank, call)

    def _count_results(self, method: str, collect: Function) -> Function:
        """Returns a function that counts the payload bytes of the results, then collects them."""
        return functools.partial(count_and_collect, self.traffic, f"{self.name}/{method}", collect)

    def call_all(
        self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Calls a method that all ranks run with the same arguments; returns results in rank order."""
        return self.call(method, *args, **kwargs)  # type: ignore[arg-type]

    def call_each(self, method: Callable[[W, T], R], values: Sequence[T]) -> list[R]:
        """Calls a method that gives each rank its entry of `values`; returns results in rank order."""
        return self.call(method, values)  # type: ignore[arg-type]

    def begin(
        self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> DataProtoFuture:
        """Calls a method registered with `blocking=False`; `get()` waits for its result."""
        return self.call(method, *args, **kwargs)  # type: ignore[return-value]

    def execute_all_async(self, method: str, *args: Any, **kwargs: Any) -> DataProtoFuture:
        """Calls a method on all ranks with the same arguments; `get()` returns a list."""
        return self._execute(range(self.world_size), list, method, args, kwargs)

    def execute_all_sync(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a method on all ranks with the same arguments; returns results in rank order."""
        return list(self.execute_all_async(method, *args, **kwargs).get())

    execute_all = execute_all_sync

    def execute_rank_zero_async(self, method: str, *args: Any, **kwargs: Any) -> DataProtoFuture:
        """Calls a method on rank 0; `get()` returns its result."""
        return self._execute(range(1), operator.itemgetter(0), method, args, kwargs)

    def execute_rank_zero_sync(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method on rank 0 and waits for its result."""
        return self.execute_rank_zero_async(method, *args, **kwargs).get()

    execute_rank_zero = execute_rank_zero_sync

    def _execute(
        self,
        ranks: range,
        collect: Callable[[list[Any]], Any],
        method: str,
        args: tuple[Any, ...],
        kwargs: Settings,
    ) -> DataProtoFuture:
        call = Call(self._role, method, args, kwargs)
        handles = [self._submit(rank, call) for rank in ranks]
        resolve = self._executor.resolver(self.name, method)
        return DataProtoFuture(self._count_results(method, collect), handles, resolve=resolve)

    def spawn(self, prefix_set: Iterable[str | Role]) -> dict[str, WorkerGroup[Any]]:
        """Returns a group for each of these colocated roles, on the same processes."""
        if not self._group_by_role:
            raise ValueError(
                f"worker group {self.name!r} has a single role; colocate several with "
                "create_colocated_worker_cls before spawning"
            )
        roles = [str(role) for role in prefix_set]
        if unknown := sorted(set(roles) - self._group_by_role.keys()):
            known = sorted(self._group_by_role)
            raise ValueError(f"no role {unknown} in worker group {self.name!r}; it has {known}")
        return {role: self._group_by_role[role] for role in roles}

    spawn_fused = spawn

    def fuse(self, prefix_set: Iterable[str | Role]) -> None:
        """Makes the group of each role an attribute: `group.critic.compute_values(…)`."""
        vars(self).update(self.spawn(prefix_set))

    def shutdown(self) -> None:
        """Stops the ranks of this group and of every group on the same processes."""
        self._executor.shutdown()

    def __enter__(self) -> WorkerGroup[W]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()


def _collect_slots(collect: Callable[[list[T]], R], mesh: Mesh, results: list[T]) -> R:
    """Collects one result per data-parallel slot."""
    return collect([results[rank] for rank in mesh.collect_ranks])


def payload_bytes(value: Any) -> int:
    """Returns the bytes of tensors, arrays, text and lists of numbers in a value.

    Single numbers are not counted. Nothing is pickled; an object that several rows share counts once.
    """
    total_bytes, seen_ids = 0, set()
    parts: list[Any] = [value]  # grows in the loop; keeps the parts alive, so that ids are unique
    for part in parts:
        if isinstance(part, _NUMBER_TYPES + _TYPES_SENT_BY_NAME) or id(part) in seen_ids:
            continue
        seen_ids.add(id(part))
        if isinstance(part, _TEXT_TYPES):
            total_bytes += len(part)
        elif isinstance(part, _SEQUENCE_TYPES):
            # A list of token ids or log-probs is long, so only three entries are checked.
            if part and all(isinstance(part[i], _NUMBER_TYPES) for i in (0, len(part) // 2, -1)):
                total_bytes += _NUMBER_BYTES * len(part)
            else:
                parts += part
        elif isinstance(part, torch.Tensor):
            total_bytes += part.values().nbytes if part.is_nested else part.nbytes
        elif isinstance(part, np.ndarray) and part.dtype != object:
            total_bytes += part.nbytes
        elif isinstance(part, np.ndarray):
            parts += part.flat
        else:
            parts += (part if isinstance(part, Mapping) else getattr(part, "__dict__", {})).values()
    return total_bytes


def count_and_collect(
    traffic: Counter[str], key: str, collect: Callable[[list[Any]], T], results: list[Any]
) -> T:
    """Adds the payload bytes of the results to `traffic[key]` and returns `collect(results)`."""
    traffic[key] += sum(map(payload_bytes, results))
    return collect(results)


def traffic_metrics(counters: Iterable[Counter[str]]) -> dict[str, float]:
    """Returns the bytes per method since the last call and their sum; clears the counters."""
    total: Counter[str] = Counter({"weights": 0})  # reported even if it is 0
    for counter in {id(counter): counter for counter in counters}.values():
        total.update(counter)
        counter.clear()
    metrics = {
        f"traffic/{key}_bytes": float(count)
        for key, count in total.items()
        if count or key == "weights"
    }
    return metrics | {"traffic/step_bytes": float(total.total())}
