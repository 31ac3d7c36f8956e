"""WorkerGroup: many ranks that look like one object to the loop.

Every registered method of the worker's class becomes a method of the group: split, call all ranks,
join. Leaves out where ranks run: that is its crew's business.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from hone.controller.class_with_init_args import ClassWithInitArgs, ColocatedClass
from hone.controller.colocated import fused_members
from hone.controller.crew import Call, Crew
from hone.controller.decorator import Execute, MethodSpec, registered_methods
from hone.controller.modes import DATA_PARALLEL, Mesh
from hone.controller.resource_pool import Role
from hone.protocol import DataProtoFuture
from hone.types import Function

W = TypeVar("W", covariant=True)
"""The worker's class."""
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class GroupView:
    """What a collect function may ask of a group, light enough to travel with a future."""

    world_size: int
    meshes: dict[str, Mesh] = field(default_factory=dict)

    def mesh(self, name: str) -> Mesh:
        return self.meshes[name]


class WorkerGroup(Generic[W]):
    """Calls the ranks of a crew; one role of them where several are colocated.

    `group.method(…)` calls any registered method by its name. `call`, `call_all`, `call_each` and
    `begin` take the method itself, and type checkers check arguments and result against it.
    """

    def __init__(
        self, crew: Crew[Any], made_of: ClassWithInitArgs, name: str, role: str = ""
    ) -> None:
        self._crew = crew
        self._role = role
        self._meshes: dict[str, Mesh] = {}
        self.name = name
        self._bound: dict[str, Function] = {}
        members = made_of.members if isinstance(made_of, ColocatedClass) else fused_members(made_of)
        self._by_role: dict[str, WorkerGroup[Any]] = {
            member_role: WorkerGroup(crew, member, member_role, member_role)
            for member_role, member in members.items()
        }
        if isinstance(made_of, ColocatedClass):
            for member_role, group in self._by_role.items():
                self._bound |= {f"{member_role}_{m}": call for m, call in group._bound.items()}
        else:
            for method, spec in registered_methods(made_of.cls).items():
                self._bound[method] = functools.partial(self._call, method, spec)

    # -- what it is ---------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        return self._crew.world_size

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.world_size} ranks)"

    def __getattr__(self, name: str) -> Function:
        bound = self.__dict__.get("_bound", {})
        if name in bound:
            return bound[name]
        if name.startswith("__"):
            raise AttributeError(name)
        close = difflib.get_close_matches(name, bound, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise AttributeError(
            f"worker group {self.__dict__.get('name', '')!r} has no method {name!r}.{hint} "
            f"Registered are {sorted(bound)}"
        )

    @property
    def data_parallel_size(self) -> int:
        """How many ways rows are split: the data-parallel slots of the workers' engine."""
        return self.mesh(DATA_PARALLEL).dp_size

    def mesh(self, name: str) -> Mesh:
        """Where each rank stands on a named mesh; asked once."""
        if name not in self._meshes:
            places = self.execute_all("mesh_place", name)
            mesh = Mesh(tuple(p[0] for p in places), tuple(p[1] for p in places))
            _check_mesh(mesh, name)
            self._meshes[name] = mesh
        return self._meshes[name]

    # -- calling ------------------------------------------------------------------------------

    def call(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """One result: that of rank 0, or the batches of all ranks joined."""
        return getattr(self, method.__name__)(*args, **kwargs)

    def call_all(
        self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """All ranks get the same arguments; their results in rank order."""
        return getattr(self, method.__name__)(*args, **kwargs)

    def call_each(self, method: Callable[[W, T], R], values: Sequence[T]) -> list[R]:
        """Each rank gets its own value; their results in rank order."""
        return getattr(self, method.__name__)(values)

    def begin(
        self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> DataProtoFuture:
        """Call a method that is registered with `blocking=False`; `get()` waits for its result."""
        return getattr(self, method.__name__)(*args, **kwargs)

    def execute_all_async(self, method: str, *args: Any, **kwargs: Any) -> DataProtoFuture:
        """Call a method on all ranks with the same arguments; `get()` gives the list of results."""
        call = Call(self._role, method, args, kwargs)
        handles = [self._crew.submit(rank, call) for rank in range(self.world_size)]
        return DataProtoFuture(list, handles, resolve=self._crew.resolver(self.name, method))

    def execute_all_sync(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on all ranks with the same arguments; results in rank order."""
        return list(self.execute_all_async(method, *args, **kwargs).get())

    execute_all = execute_all_sync

    def execute_rank_zero_async(self, method: str, *args: Any, **kwargs: Any) -> DataProtoFuture:
        """Call a method on rank 0; `get()` gives its result."""
        handle = self._crew.submit(0, Call(self._role, method, args, kwargs))
        return DataProtoFuture(_only, [handle], resolve=self._crew.resolver(self.name, method))

    def execute_rank_zero_sync(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method on rank 0 and wait for its result."""
        return self.execute_rank_zero_async(method, *args, **kwargs).get()

    execute_rank_zero = execute_rank_zero_sync

    def spawn(self, prefix_set: Iterable[str | Role]) -> dict[str, WorkerGroup[Any]]:
        """A group for each of these colocated roles, on the same processes."""
        if not self._by_role:
            raise ValueError(
                f"worker group {self.name!r} holds one role; colocate several with "
                "create_colocated_worker_cls before spawning"
            )
        wanted = [str(role) for role in prefix_set]
        unknown = sorted(set(wanted) - self._by_role.keys())
        if unknown:
            roles = sorted(self._by_role)
            raise ValueError(f"no role {unknown} in worker group {self.name!r}; it has {roles}")
        return {role: self._by_role[role] for role in wanted}

    spawn_fused = spawn

    def fuse(self, prefix_set: Iterable[str | Role]) -> None:
        """Make each of these roles an attribute: `group.critic.compute_values(…)`."""
        vars(self).update(self.spawn(prefix_set))

    def shutdown(self) -> None:
        """Stop the ranks, and with them every group on the same processes."""
        self._crew.shutdown()

    def __enter__(self) -> WorkerGroup[W]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    # -- binding ------------------------------------------------------------------------------

    def _call(self, method: str, spec: MethodSpec, *args: Any, **kwargs: Any) -> Any:
        mode = spec.dispatch_mode
        split_args, split_kwargs = mode.dispatch_fn(self, *args, **kwargs)
        rank_zero = mode.rank_zero_only or spec.execute_mode is Execute.RANK_ZERO
        ranks = range(1) if rank_zero else range(self.world_size)
        handles = []
        for rank in ranks:
            call = Call(
                self._role,
                method,
                tuple(values[rank] for values in split_args),
                {key: values[rank] for key, values in split_kwargs.items()},
            )
            handles.append(self._crew.submit(rank, call))
        # A future may be resolved in another process, where there is no group: it takes a view.
        group = self if spec.blocking else GroupView(self.world_size, dict(self._meshes))
        collect: Function = functools.partial(mode.collect_fn, group)
        if rank_zero:
            collect = _only
        elif mode.by_slot:
            collect = functools.partial(_of_slots, collect, self.mesh(DATA_PARALLEL))
        future = DataProtoFuture(collect, handles, resolve=self._crew.resolver(self.name, method))
        return future.get() if spec.blocking else future


def _only(results: list[R]) -> R:
    return results[0]


def _of_slots(collect: Callable[[list[T]], R], mesh: Mesh, results: list[T]) -> R:
    """Collect one result per data-parallel slot: the others of a slot say the same."""
    return collect([results[rank] for rank in mesh.answering])


def _check_mesh(mesh: Mesh, name: str) -> None:
    answering = sorted(
        group for group, collects in zip(mesh.dp_ranks, mesh.collects, strict=True) if collects
    )
    if answering != list(range(mesh.dp_size)):
        raise ValueError(
            f"mesh {name!r}: each of {mesh.dp_size} data-parallel slots needs exactly one rank "
            f"that collects; those that do are in slots {answering}"
        )
