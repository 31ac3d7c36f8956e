"""LocalWorkerGroup, the default worker group: one rank in this process.

WorkerHost creates and calls the workers of one rank; the Ray controller uses it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from hone.controller.colocated import ClassWithInitArgs, ColocatedClass
from hone.controller.decorator import TensorDictPayload, is_tensordict_batch, method_spec
from hone.controller.resource_pool import ResourcePool
from hone.controller.threads import set_thread_count, thread_count
from hone.controller.worker import Placement, Worker, use_placement
from hone.controller.worker_group import Call, Executor, PhaseDeadlines, W, WorkerGroup
from hone.protocol import PADDED_ROW, DataProto, DataProtoFuture, real_row_mask, without_padding

logger = logging.getLogger(__name__)

LOOP_STOP_DEADLINE_S = 5.0

_T = TypeVar("_T")


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
        spec = method_spec(method)
        if spec is None or spec.materialize_futures:
            args = tuple(_materialize(value) for value in args)
            kwargs = {key: _materialize(value) for key, value in kwargs.items()}
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
        inputs = [_as_data_proto(value) for value in (*args, *kwargs.values())]
        batch = drop_padded_rows(_as_data_proto(result), inputs).to("cpu")
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


def drop_padded_rows(result: DataProto, inputs: Sequence[Any]) -> DataProto:
    """Removes the result rows that belong to padded input rows."""
    batches = [value for value in inputs if isinstance(value, DataProto)]
    padded_inputs = [batch for batch in batches if batch.has_column(PADDED_ROW)]
    if result.has_column(PADDED_ROW):
        real_rows = without_padding(result)
    elif not padded_inputs or len(result) == 0:
        real_rows = result
    else:
        is_real = real_row_mask(padded_inputs[0])
        if len(result) == int(is_real.sum()):
            real_rows = result  # the worker has already dropped the padding
        elif len(result) % len(is_real) == 0 and all(
            real_row_mask(batch).tolist() == is_real.tolist() for batch in batches if len(batch)
        ):
            repeat_count = len(result) // len(is_real)
            real_rows = result.select_idxs(is_real.repeat_interleave(repeat_count))
        else:
            raise ValueError(
                f"a worker got {len(is_real)} rows, {int((~is_real).sum())} of them padding, and returned "
                f"{len(result)}, so the padded rows are unknown; copy the column {PADDED_ROW!r} of one "
                "batch to the result, or drop padded rows first with hone.protocol.without_padding"
            )
    if padded_inputs and not torch.stack([real_row_mask(v).any() for v in padded_inputs]).any():
        real_rows = real_rows.select()
        real_rows.meta_info.pop("metrics", None)  # every input row is padding
    return real_rows


def _as_data_proto(value: Any) -> Any:
    return DataProto.from_tensordict(value) if is_tensordict_batch(value) else value


def _materialize(value: Any) -> Any:
    if isinstance(value, TensorDictPayload):
        return value.batch.to_tensordict()
    return value.get() if isinstance(value, DataProtoFuture) else value
