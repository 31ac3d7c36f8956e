"""WorkerHost: one rank's workers in this process, and one call to one of them.

The same code runs a call under every controller: futures are waited for, coroutines are run, rows
added to even out ranks are dropped from the result. Leaves out how a call gets here.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import torch

from hone.controller.class_with_init_args import ClassWithInitArgs, ColocatedClass
from hone.controller.crew import Call
from hone.controller.decorator import method_spec
from hone.controller.modes import TensorDictRows, has_rows
from hone.controller.threads import fix_threads
from hone.controller.worker import Placement, Worker, placed
from hone.protocol import PADDED_ROW, DataProto, DataProtoFuture, real_rows, without_padding

logger = logging.getLogger(__name__)

LOOP_STOP_DEADLINE_S = 5.0

_T = TypeVar("_T")


class WorkerHost:
    """The workers of one rank: one, or one for each colocated role."""

    def __init__(self, made_of: ClassWithInitArgs, placement: Placement, threads: int) -> None:
        fix_threads(threads)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        members = made_of.members if isinstance(made_of, ColocatedClass) else {"": made_of}
        self._workers: dict[str, Worker] = {}
        for role, member in members.items():
            with placed(placement if not role else _with_role(placement, role)):
                self._workers[role] = member()
        for worker in self._workers.values():
            if isinstance(worker, Worker):
                worker.colocate(self._workers)

    def call(self, call: Call) -> Any:
        """Run one method of one worker."""
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
            result = drop_padded_rows(result, inputs).to("cpu")
        elif has_rows(result):
            rows = [DataProto.from_tensordict(v) if has_rows(v) else v for v in inputs]
            result = drop_padded_rows(DataProto.from_tensordict(result), rows).to("cpu")
            result = result.to_tensordict()
        return result

    def worker(self, role: str = "") -> Worker:
        """The worker that plays `role`."""
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
        """Let the workers say goodbye (`close`, where they have it) and stop the event loop."""
        try:
            for worker in self._workers.values():
                close = getattr(worker, "close", None)
                if callable(close):
                    close()
        finally:
            self._stop_loop()

    def _run(self, coroutine: Coroutine[None, None, _T]) -> _T:
        # One loop for the worker's life: what a coroutine leaves on it is there for the next call.
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


def drop_padded_rows(result: DataProto, inputs: list[_T]) -> DataProto:
    """The result without the rows that answer padded input rows."""
    marked = [v for v in inputs if isinstance(v, DataProto) and v.has_column(PADDED_ROW)]
    if result.has_column(PADDED_ROW):
        kept = without_padding(result)
    elif not marked or len(result) == 0:
        kept = result
    else:
        real = real_rows(marked[0])
        if len(result) == int(real.sum()):
            kept = result  # the worker dropped them itself
        elif len(result) % len(real) == 0:
            kept = result.select_idxs(real.repeat_interleave(len(result) // len(real)))
        else:
            raise ValueError(
                f"a worker got {len(real)} rows, {int((~real).sum())} of them padding, and returned "
                f"{len(result)}: which are padding cannot be told; carry the column {PADDED_ROW!r} "
                "over to the result, or drop such rows with hone.protocol.without_padding first"
            )
    if marked and not torch.stack([real_rows(v).any() for v in marked]).any():
        # This rank saw padding only: what it measured says nothing.
        kept = kept.select()
        kept.meta_info.pop("metrics", None)
    return kept


def _materialised(value: _T | DataProtoFuture) -> Any:
    if isinstance(value, TensorDictRows):
        return value.rows.to_tensordict()
    return value.get() if isinstance(value, DataProtoFuture) else value


def _with_role(placement: Placement, role: str) -> Placement:
    return replace(placement, role=role)
