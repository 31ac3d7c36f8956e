"""WorkerGroup, the object through which the training loop calls all ranks of a role.

Each registered method of the worker class becomes a group method that splits the arguments, calls
all ranks and joins the results. An Executor runs the ranks: LocalExecutor in this process, or RayExecutor as
Ray actors (ray.py). WorkerHost creates and calls the workers of one rank, under both.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from hone.controller.colocated import ClassWithInitArgs, ColocatedClass
from hone.controller.decorator import SPEC_ATTRIBUTE, Execute, MethodSpec, registered_methods
from hone.controller.dispatch import (
    DEFAULT_MESH,
    Call,
    Executor,
    GroupView,
    Mesh,
    PhaseDeadlines,
    as_data_proto,
    count_and_collect,
    drop_padded_rows,
    is_tensordict_batch,
    materialize,
    payload_bytes,
)
from hone.controller.resource_pool import ResourcePool, Role
from hone.controller.threads import set_thread_count, thread_count
from hone.controller.worker import Placement, Worker, use_placement
from hone.protocol import DataProto, DataProtoFuture
from hone.suggestions import suggestion
from hone.types import Function, Settings

logger = logging.getLogger(__name__)

LOOP_STOP_DEADLINE_S = 5.0
W = TypeVar("W", covariant=True)
"""The worker's class."""
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


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


@dataclass
class FinishedCall:
    """The result of a finished call, or its exception, which `get` raises."""

    result: Any = None
    error: BaseException | None = None

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result


class WorkerHost:
    """The workers of one rank: a single worker, or one worker per colocated role."""

    def __init__(
        self, cls_with_init: ClassWithInitArgs, placement: Placement, threads: int
    ) -> None:
        set_thread_count(threads)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        is_colocated = isinstance(cls_with_init, ColocatedClass)
        members = cls_with_init.members if is_colocated else {"": cls_with_init}
        self._workers: dict[str, Worker] = {}
        try:
            for role, member in members.items():
                with use_placement(replace(placement, role=role) if role else placement):
                    self._workers[role] = member()
        except BaseException:
            self.close()
            raise
        for worker in self._workers.values():
            if isinstance(worker, Worker):
                worker.set_colocated(self._workers)

    def call(self, call: Call) -> Any:
        """Resolves futures, runs a worker's method; returns a batch on the CPU and without padded rows."""
        method = getattr(self.worker(call.role), call.method)
        args, kwargs = call.args, call.kwargs
        spec: MethodSpec | None = getattr(method, SPEC_ATTRIBUTE, None)
        if spec is None or spec.materialize_futures:
            args = tuple(materialize(value) for value in args)
            kwargs = {key: materialize(value) for key, value in kwargs.items()}
        result = method(*args, **kwargs)
        if inspect.iscoroutine(result):
            # All calls share one event loop: a call may leave tasks that the next call awaits.
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop_thread = threading.Thread(
                    target=self._loop.run_forever, name="worker-event-loop", daemon=True
                )
                self._loop_thread.start()
            result = asyncio.run_coroutine_threadsafe(result, self._loop).result()
        if inspect.isgenerator(result) or inspect.isasyncgen(result):
            raise TypeError(
                f"{call.method!r} returned a generator, which stays in its process; return a list"
            )
        is_tensordict = is_tensordict_batch(result)
        if not is_tensordict and not isinstance(result, DataProto):
            return result
        inputs = [as_data_proto(value) for value in (*args, *kwargs.values())]
        batch = drop_padded_rows(as_data_proto(result), inputs).to("cpu")
        return batch.to_tensordict() if is_tensordict else batch

    def worker(self, role: str = "") -> Worker:
        """Returns the worker of a role; the role of a single worker is empty."""
        fused_workers = getattr(self._workers.get(""), "fused_worker_dict", {})
        if role in fused_workers:
            return fused_workers[role]
        if role not in self._workers:
            raise ValueError(
                f"this process has the roles {sorted(self._workers)}, not {role!r}; call one of the "
                "groups that spawn(roles) returns"
            )
        return self._workers[role]

    def close(self) -> None:
        """Closes the workers that have a `close` method, in order, and stops the event loop."""
        with contextlib.ExitStack() as stack:  # an error in one `close` does not skip the others
            stack.callback(self._stop_loop)
            for worker in reversed(self._workers.values()):
                fused_workers = getattr(worker, "fused_worker_dict", {}).values()
                parts = [worker] if hasattr(worker, "close") else reversed(fused_workers)
                for part in parts:
                    if callable(close := getattr(part, "close", None)):
                        stack.callback(close)

    def _stop_loop(self) -> None:
        if self._loop is None or self._loop_thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join(timeout=LOOP_STOP_DEADLINE_S)
        if self._loop_thread.is_alive():
            logger.warning("the event loop of a worker is still busy; it was not closed")
        else:
            self._loop.close()
        self._loop = self._loop_thread = None


class LocalExecutor(Executor[FinishedCall]):
    """A single rank in this process; `submit` returns after the call has finished."""

    world_size = 1

    def __init__(self, cls_with_init: ClassWithInitArgs, role: str, threads: int) -> None:
        self._host: WorkerHost | None = WorkerHost(cls_with_init, Placement(role=role), threads)
        self._role = role

    def submit(self, rank: int, call: Call) -> FinishedCall:
        if self._host is None:
            raise RuntimeError(f"worker group {self._role!r} was shut down; create a new one")
        try:
            return FinishedCall(self._host.call(call))
        except Exception as error:  # `get` raises it, as under Ray
            return FinishedCall(error=error)

    def resolver(self, role: str, method: str) -> Callable[[Sequence[FinishedCall]], list[Any]]:
        return get_results

    def shutdown(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            host.close()


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
        executor = LocalExecutor(ray_cls_with_init, name, threads or thread_count())
        super().__init__(executor, ray_cls_with_init, name)


def get_results(handles: Sequence[FinishedCall]) -> list[Any]:
    """Returns the results of finished calls, or raises the first error."""
    return [handle.get() for handle in handles]
