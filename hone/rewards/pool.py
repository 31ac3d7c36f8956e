"""Scoring processes with hard deadlines: a call that is late is killed, its slot filled again.

Workers are fresh interpreters (never forks of this threaded process) that import no torch. One
thread multiplexes them; results come back in the order of the jobs.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar

from hone.rewards.failures import Failed
from hone.types import Settings

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""A worker imports Python modules before its first job; on a loaded machine that takes a while."""
START_RETRIES = 2
"""How often in a row each worker that was killed while it started is replaced."""
MESSAGE_TIMEOUT_S = 60.0
"""A worker that neither takes nor finishes a message for this long has stopped."""
KILL_TIMEOUT_S = 10.0


T = TypeVar("T")


class PoolError(RuntimeError):
    """Workers cannot be started, or the pool is closed."""


class _Worker:
    """One process and what it is doing."""

    def __init__(self, factory: str, keywords: Settings) -> None:
        ours, theirs = socket.socketpair()
        for limit in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", int(MESSAGE_TIMEOUT_S), 0))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hone.rewards.pool_worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                env=_same_imports(),
            )
        self.link = Connection(ours.detach())
        self.job: int | None = None
        self.ready = False
        self.deadline = time.monotonic() + START_TIMEOUT_S
        with contextlib.suppress(OSError):  # it has died already: the pool sees its end
            self.link.send((factory, dict(keywords)))

    def give(self, job: int, arguments: Settings, timeout_s: float) -> None:
        self.link.send((dict(arguments), timeout_s))
        self.job = job
        self.deadline = time.monotonic() + timeout_s

    def kill(self) -> None:
        """End the process and every child it left in its session."""
        self.link.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(
            subprocess.TimeoutExpired
        ):  # stuck in the kernel, and no longer ours
            self.process.wait(KILL_TIMEOUT_S)


def _same_imports() -> dict[str, str]:
    """An environment in which a fresh interpreter finds the modules that this one finds."""
    paths = [path or os.getcwd() for path in sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


class DeadlinePool(Generic[T]):
    """Processes that each hold what `factory` (`"module:name"`) makes from `keywords`.

    `run` calls that object once a job with the job's keyword arguments.
    """

    def __init__(self, factory: str, keywords: Settings, size: int) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one process, got {size}")
        self.factory = factory
        self.keywords = dict(keywords)
        self.size = size
        self.workers: list[_Worker] = []
        self.owner = os.getpid()
        self.closed = False
        self.failed_starts = 0  # in a row
        self.lock = threading.Lock()
        _open_pools.add(self)

    def run(self, jobs: Sequence[Settings], timeout_s: float) -> list[T | Failed]:
        """What each job returned, or Failed with reason `timeout`, `crash` or `exception`."""
        with self.lock:
            if self.closed:
                raise PoolError("the pool is closed; make a new one")
            if self.owner != os.getpid():
                # A fork of the owner: its workers answer the owner, so start our own.
                self.workers, self.owner = [], os.getpid()
            try:
                return self._run(jobs, timeout_s)
            finally:
                # An interrupt may leave a job unanswered; such a worker cannot be trusted again.
                for worker in [w for w in self.workers if w.job is not None]:
                    self._drop(worker)

    def _run(self, jobs: Sequence[Settings], timeout_s: float) -> list[T | Failed]:
        results: dict[int, T | Failed] = {}
        waiting = deque(range(len(jobs)))
        while waiting or any(worker.job is not None for worker in self.workers):
            self._fill(min(self.size, len(waiting) + sum(w.job is not None for w in self.workers)))
            for worker in [w for w in self.workers if w.ready and w.job is None]:
                if waiting and self._give(worker, waiting[0], jobs[waiting[0]], timeout_s):
                    waiting.popleft()
            if not self.workers:
                continue
            self._collect(results, timeout_s)
        return [results[job] for job in range(len(jobs))]

    def _fill(self, wanted: int) -> None:
        while len(self.workers) < wanted:
            try:
                self.workers.append(_Worker(self.factory, self.keywords))
            except OSError as error:  # no process, memory or descriptor left
                raise PoolError(
                    f"a scoring process could not be started: {error}; use fewer "
                    "reward_model.reward_kwargs.num_processes"
                ) from error

    def _give(self, worker: _Worker, job: int, arguments: Settings, timeout_s: float) -> bool:
        try:
            worker.give(job, arguments, timeout_s)
        except OSError:  # it died while idle (killed for memory, say): the job goes to another
            self._drop(worker)
            return False
        return True

    def _collect(self, results: dict[int, T | Failed], timeout_s: float) -> None:
        """Wait for the next answer or deadline, and act on all that are due."""
        active = [w for w in self.workers if w.job is not None or not w.ready]
        nearest = min(worker.deadline for worker in active)
        arrived = set(wait([w.link for w in active], max(0.0, nearest - time.monotonic())))
        for worker in active:
            if worker.link in arrived:
                self._receive(worker, results)
            elif time.monotonic() >= worker.deadline:
                self._drop(worker)
                if worker.job is None:
                    raise PoolError(
                        f"a scoring process was not ready after {START_TIMEOUT_S:g} s; the machine "
                        "may be overloaded: use fewer reward_model.reward_kwargs.num_processes"
                    )
                results[worker.job] = Failed(
                    "timeout", f"no score after {timeout_s:g} s; the process was killed"
                )

    def _receive(self, worker: _Worker, results: dict[int, T | Failed]) -> None:
        try:
            answer = worker.link.recv()
        except (EOFError, OSError):
            self._drop(worker)
            code = worker.process.returncode
            if not worker.ready:
                self._start_failed(code)
                return
            assert worker.job is not None
            results[worker.job] = Failed("crash", f"the scoring process ended with code {code}")
            return
        except (AttributeError, ImportError, TypeError) as error:
            answer = Failed("bad_return", f"cannot be read in the parent process: {error}")
        if not worker.ready:
            if isinstance(answer, Failed):
                self._drop(worker)
                raise PoolError(f"{self.factory} could not start: {answer.detail}")
            worker.ready = True
            self.failed_starts = 0
            return
        job, worker.job = worker.job, None
        assert job is not None
        if isinstance(answer, BaseException):
            raise answer
        results[job] = answer

    def _start_failed(self, code: int | None) -> None:
        """The next round starts another process, unless too many in a row did not come up."""
        self.failed_starts += 1
        sentence = f"a scoring process ended with code {code} while starting {self.factory}"
        if self.failed_starts <= START_RETRIES * self.size:
            logger.warning("%s; another is started", sentence)
            return
        times, self.failed_starts = self.failed_starts, 0
        why = " (killed: is there enough memory?)" if code == -signal.SIGKILL else ""
        raise PoolError(
            f"{sentence}{why}, as did the {times - 1} before it; its own message is on stderr"
        )

    def _drop(self, worker: _Worker) -> None:
        worker.kill()
        self.workers.remove(worker)

    def close(self) -> None:
        """End all workers. Safe to call twice."""
        with self.lock:
            self.closed = True
            for worker in list(self.workers) if self.owner == os.getpid() else []:
                self._drop(worker)
        _open_pools.discard(self)


_open_pools: weakref.WeakSet[DeadlinePool] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_open_pools):
        pool.close()
