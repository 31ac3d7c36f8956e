"""WorkerGroup, the object through which the training loop calls all ranks of a role.

Each registered method of the worker class becomes a method of the group (dispatch.py).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Concatenate

from hone.controller.colocated import ClassWithInitArgs, ColocatedClass
from hone.controller.contract import Call, Executor, Mesh
from hone.controller.decorator import registered_methods
from hone.controller.dispatch import LocalExecutor, P, R, W, WorkerGroupBase, WorkerHost
from hone.controller.resource_pool import ResourcePool, Role
from hone.controller.threads import set_thread_count, thread_count
from hone.controller.worker import Placement, Worker, use_placement
from hone.event_loop import PhaseDeadlines
from hone.protocol import DataProtoFuture
from hone.types import Settings


class WorkerGroup(WorkerGroupBase[W]):
    """Calls the ranks of one role, with verl's methods for all ranks, for rank 0 and for colocated roles."""

    def __init__(
        self, executor: Executor[Any], cls_with_init: ClassWithInitArgs, name: str, role: str = ""
    ) -> None:
        super().__init__(executor, name, role)
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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.world_size} ranks)"

    def _request_mesh(self, name: str) -> Mesh:
        mesh = Mesh(*zip(*self.execute_all("mesh_slot", name), strict=True))
        mesh.check(name)
        return mesh

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


def build_host(cls_with_init: ClassWithInitArgs, placement: Placement, threads: int) -> WorkerHost:
    """Sets the number of CPU threads of this process and creates the workers of its rank."""
    set_thread_count(threads)
    host = WorkerHost()
    is_colocated = isinstance(cls_with_init, ColocatedClass)
    members = cls_with_init.members if is_colocated else {"": cls_with_init}
    try:
        for role, member in members.items():
            with use_placement(replace(placement, role=role) if role else placement):
                host.workers[role] = member()
    except BaseException:
        host.close()
        raise
    for worker in host.workers.values():
        if isinstance(worker, Worker):
            worker.set_colocated(host.workers)
    return host


class LocalWorkerGroup(WorkerGroup[W]):
    """A worker group of one rank, in this process."""

    def __init__(
        self,
        resource_pool: ResourcePool | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        name_prefix: str = "",
        start_deadline_s: float | None = None,
        deadlines: PhaseDeadlines | None = None,
        liveness_deadline_s: float | None = None,
        threads: int | None = None,
    ) -> None:
        """Takes RayWorkerGroup's arguments except `worker_env`; deadlines have no effect."""
        if ray_cls_with_init is None:
            raise ValueError("ray_cls_with_init is missing: ClassWithInitArgs(YourWorker, …)")
        if resource_pool is not None and resource_pool.world_size != 1:
            raise ValueError(
                f"the local controller has 1 rank, and the resource pool has "
                f"{resource_pool.world_size}; set trainer.controller=ray, or "
                "trainer.n_gpus_per_node=1 trainer.nnodes=1"
            )
        name = name_prefix or ray_cls_with_init.name
        host = build_host(ray_cls_with_init, Placement(role=name), threads or thread_count())
        executor = LocalExecutor(host, name)
        super().__init__(executor, ray_cls_with_init, name)
