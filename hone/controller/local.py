"""LocalWorkerGroup, the default: one rank in this process. WorkerHost holds the workers of one rank.

Under both controllers a call resolves its futures, runs coroutines and drops padded rows.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from hone.controller.colocated import ClassWithInitArgs, ColocatedClass
from hone.controller.decorator import TensorDictRows, has_rows, method_spec
from hone.controller.resource_pool import ResourcePool
from hone.controller.threads import fix_threads, thread_count
from hone.controller.waiting import PhaseDeadlines
from hone.controller.worker import Placement, Worker, placed
from hone.controller.worker_group import Call, Crew, W, WorkerGroup
from hone.protocol import PADDED_ROW, DataProto, DataProtoFuture, real_rows, without_padding

logger = logging.getLogger(__name__)

LOOP_STOP_DEADLINE_S = 5.0

_T = TypeVar("_T")


@dataclass
class Done:
    """The result of a finished call, or its exception, which `get` raises."""

    result: Any = None
    error: BaseException | None = None

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result


class WorkerHost:
    """The workers of one rank: a single one, or one per colocated role."""

    def __init__(self, made_of: ClassWithInitArgs, placement: Placement, threads: int) -> None:
        fix_threads(threads)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        members = made_of.members if isinstance(made_of, ColocatedClass) else {"": made_of}
        self._workers: dict[str, Worker] = {}
        for role, member in members.items():
            with placed(replace(placement, role=role) if role else placement):
                self._workers[role] = member()
        for worker in self._workers.values():
            if isinstance(worker, Worker):
                worker.colocate(self._workers)

    def call(self, call: Call) -> Any:
        """Runs one method of one worker."""
        function = getattr(self.worker(call.role), call.method)
        args, kwargs = call.args, call.kwargs
        spec = method_spec(function)
        if spec is None or spec.materialize_futures:
            args = tuple(_materialised(value) for value in args)
            kwargs = {key: _materialised(value) for key, value in kwargs.items()}
        result = function(*args, **kwargs)
        if inspect.iscoroutine(result):
            result = self._run(result)
        inputs = [*args, *kwargs.values()]
        if isinstance(result, DataProto):
            return drop_padded_rows(result, inputs).to("cpu")
        if has_rows(result):
            rows = [DataProto.from_tensordict(v) if has_rows(v) else v for v in inputs]
            batch = drop_padded_rows(DataProto.from_tensordict(result), rows)
            return batch.to("cpu").to_tensordict()
        return result

    def worker(self, role: str = "") -> Worker:
        """Returns the worker of this role."""
        fused = getattr(self._workers.get(""), "fused_worker_dict", {})
        if role in fused:
            return fused[role]
        if role not in self._workers:
            raise ValueError(
                f"this process holds the roles {sorted(self._workers)}, not {role!r}; call one of "
                "the groups that spawn(roles) gives"
            )
        return self._workers[role]

    def close(self) -> None:
        """Closes the workers that have a `close` method and stops the event loop."""
        try:
            for worker in self._workers.values():
                close = getattr(worker, "close", None)
                if callable(close):
                    close()
        finally:
            self._stop_loop()

    def _run(self, coroutine: Coroutine[None, None, _T]) -> _T:
        # All calls share one event loop, so that tasks of one call survive until the next.
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop_thread = threading.Thread(
                target=self._loop.run_forever, name="worker-event-loop", daemon=True
            )
            self._loop_thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _stop_loop(self) -> None:
        if self._loop is None or self._loop_thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join(timeout=LOOP_STOP_DEADLINE_S)
        if self._loop_thread.is_alive():
            logger.warning("a worker's event loop is still busy and was left behind")
        else:
            self._loop.close()
        self._loop = self._loop_thread = None


class LocalCrew(Crew[Done]):
    """A single rank in this process; `submit` returns after the call has finished."""

    world_size = 1

    def __init__(self, made_of: ClassWithInitArgs, role: str, threads: int) -> None:
        self._host: WorkerHost | None = WorkerHost(made_of, Placement(role=role), threads)
        self._role = role

    @property
    def host(self) -> WorkerHost:
        if self._host is None:
            raise RuntimeError(f"worker group {self._role!r} was shut down; make a new one")
        return self._host

    def submit(self, rank: int, call: Call) -> Done:
        host = self.host
        try:
            return Done(host.call(call))
        except Exception as error:  # raised when the caller resolves the handle, as under Ray
            return Done(error=error)

    def resolver(self, owner: str, method: str) -> Callable[[Sequence[Done]], list[Any]]:
        return finished

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
        """Takes the arguments of a Ray group; deadlines have no effect."""
        if ray_cls_with_init is None:
            raise ValueError("ray_cls_with_init is missing: ClassWithInitArgs(YourWorker, …)")
        if resource_pool is not None and resource_pool.world_size != 1:
            raise ValueError(
                f"the local controller has 1 rank and the resource pool asks for "
                f"{resource_pool.world_size}; set trainer.controller=ray, or "
                "trainer.n_gpus_per_node=1 trainer.nnodes=1"
            )
        name = name_prefix or ray_cls_with_init.name
        crew = LocalCrew(ray_cls_with_init, name, threads or thread_count())
        super().__init__(crew, ray_cls_with_init, name)


def finished(handles: Sequence[Done]) -> list[Any]:
    """Returns the results of finished calls, or raises the first error."""
    return [handle.get() for handle in handles]


def drop_padded_rows(result: DataProto, inputs: Sequence[Any]) -> DataProto:
    """Removes the result rows that belong to padded input rows."""
    padded = [v for v in inputs if isinstance(v, DataProto) and v.has_column(PADDED_ROW)]
    if result.has_column(PADDED_ROW):
        rows = without_padding(result)
    elif not padded or len(result) == 0:
        rows = result
    else:
        real = real_rows(padded[0])
        if len(result) == int(real.sum()):
            rows = result  # the worker has already dropped them
        elif len(result) % len(real) == 0:
            rows = result.select_idxs(real.repeat_interleave(len(result) // len(real)))
        else:
            raise ValueError(
                f"a worker got {len(real)} rows, {int((~real).sum())} of them padding, and returned "
                f"{len(result)}: which are padding cannot be told; carry the column {PADDED_ROW!r} "
                "over to the result, or drop such rows with hone.protocol.without_padding first"
            )
    if padded and not torch.stack([real_rows(v).any() for v in padded]).any():
        rows = rows.select()
        rows.meta_info.pop("metrics", None)  # metrics over padded rows only are meaningless
    return rows


def _materialised(value: Any) -> Any:
    if isinstance(value, TensorDictRows):
        return value.rows.to_tensordict()
    return value.get() if isinstance(value, DataProtoFuture) else value
