"""Scoring processes with hard deadlines: a process that exceeds one is killed and replaced.

Workers are new interpreters without torch, never forks of this process, which has threads.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

from hone.rewards.failures import Failed
from hone.text import error_text
from hone.types import Settings

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Long, because a worker imports modules before its first job, slowly if the CPU is busy."""
START_RETRIES = 2  # how many times in succession a worker that died during its start is replaced
MESSAGE_TIMEOUT_S = 60.0
"""A worker that does not read or finish a message for this long counts as dead."""
KILL_TIMEOUT_S = 10.0  # how long the end of a killed process is awaited

T = TypeVar("T")


class PoolError(RuntimeError):
    """Workers cannot be started, or the pool is closed."""


class _Worker:
    """A process and the socket to it."""

    def __init__(self, factory: str, keywords: Settings) -> None:
        our_end, worker_end = socket.socketpair()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            seconds = struct.pack("ll", int(MESSAGE_TIMEOUT_S), 0)
            our_end.setsockopt(socket.SOL_SOCKET, option, seconds)
        # The new interpreter must find the same modules as this one.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with worker_end:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hone.rewards.pool_worker", str(worker_end.fileno())],
                pass_fds=[worker_end.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
            )
        self.connection = Connection(our_end.detach())
        with contextlib.suppress(OSError):  # `_start` handles a process that has died already
            self.connection.send_bytes(pickle.dumps((factory, dict(keywords))))

    def kill(self) -> None:
        """Kills the process and all processes of its session."""
        if self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel
            self.process.wait(KILL_TIMEOUT_S)


class DeadlinePool(Generic[T]):
    """Processes that call `factory(**keywords)(**job)` for each job; `factory` is `"module:name"`."""

    def __init__(self, factory: str, keywords: Settings, size: int) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one process, got {size}")
        self.factory = factory
        self.keywords = dict(keywords)
        self.size = size
        self._workers: set[_Worker] = set()
        self._idle_workers: list[_Worker] = []
        self._owner_pid = os.getpid()
        self._is_stopping = self._is_closed = False
        self._lock = threading.Lock()
        _open_pools.add(self)

    def run(self, jobs: Sequence[Settings], timeout_s: float) -> list[T | Failed]:
        """Returns each job's value, or Failed with reason `timeout`, `crash` or `exception`."""
        with self._lock:
            if self._is_closed:
                raise PoolError("the pool is closed; create a new one")
            if self._owner_pid != os.getpid():
                # In a fork, the existing workers answer the parent process, so start new ones.
                self._workers, self._idle_workers, self._owner_pid = set(), [], os.getpid()
            self._is_stopping = False
            threads = ThreadPoolExecutor(self.size, thread_name_prefix="hone-score")
            try:
                return list(threads.map(lambda job: self._call(job, timeout_s), jobs))
            except BaseException:  # a failed start or an interrupt: do not wait for answers
                self._is_stopping = True
                for worker in self._workers - set(self._idle_workers):
                    worker.kill()
                raise
            finally:
                threads.shutdown(cancel_futures=True)

    def _call(self, arguments: Settings, timeout_s: float) -> T | Failed:
        """Sends a job to an idle worker, or to a new one, and returns the answer."""
        try:
            # Not `Connection.send`, which shares a tensor's memory only with children of multiprocessing.
            message = pickle.dumps((dict(arguments), timeout_s))
        except Exception as error:  # an object of the user may fail to be pickled with any error
            return Failed("bad_row", f"cannot be sent to another process: {error_text(error)}")
        while True:
            try:
                worker = self._idle_workers.pop()
            except IndexError:
                worker = self._start()
            self._drop_if_stopping(worker)
            try:
                worker.connection.send_bytes(message)
                break
            except OSError:  # the worker died while idle (out of memory): another gets the job
                self._drop(worker)
        try:
            if not worker.connection.poll(timeout_s):
                self._drop(worker)
                return Failed("timeout", f"no score after {timeout_s:g} s; the process was killed")
            answer: T | Failed | BaseException = worker.connection.recv()
        except (EOFError, OSError):
            self._drop(worker)
            code = worker.process.returncode
            return Failed("crash", f"the scoring process ended with code {code}")
        except Exception as error:  # an object of the user may fail with any error
            answer = Failed("bad_return", f"cannot be read in the parent: {error_text(error)}")
        self._idle_workers.append(worker)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _start(self) -> _Worker:
        """Starts a worker and waits until it is ready; retries START_RETRIES times if it dies."""
        for _ in range(START_RETRIES + 1):
            try:
                worker = _Worker(self.factory, self.keywords)
            except OSError as error:  # out of processes, memory or descriptors
                raise _overload_error(f"could not be started: {error}") from error
            self._workers.add(worker)
            self._drop_if_stopping(worker)
            connection = worker.connection
            try:
                answer = connection.recv() if connection.poll(START_TIMEOUT_S) else None
            except (EOFError, OSError):
                self._drop(worker)
                code = worker.process.returncode
                message = f"a scoring process ended with code {code} while starting {self.factory}"
                logger.warning("%s", message)
                continue
            if answer == "ready":
                return worker
            self._drop(worker)
            if answer is None:
                raise _overload_error(f"was not ready after {START_TIMEOUT_S:g} s")
            raise PoolError(f"{self.factory} could not start: {answer.detail}")
        hint = " (killed: is there enough memory?)" if code == -signal.SIGKILL else ""
        raise PoolError(
            f"{message}{hint}, as did the {START_RETRIES} before it; its error message is on stderr"
        )

    def _drop_if_stopping(self, worker: _Worker) -> None:
        """Kills a worker that started after `run` was interrupted, and raises PoolError."""
        if self._is_stopping:
            self._drop(worker)
            raise PoolError("the pool was interrupted")

    def _drop(self, worker: _Worker) -> None:
        worker.kill()
        worker.connection.close()
        self._workers.discard(worker)

    def close(self) -> None:
        """Ends all workers. It may be called twice."""
        with self._lock:
            self._is_closed = True
            for worker in list(self._workers) if self._owner_pid == os.getpid() else []:
                self._drop(worker)
        _open_pools.discard(self)


def _overload_error(problem: str) -> PoolError:
    return PoolError(
        f"a scoring process {problem}; the machine may be overloaded: use fewer "
        "reward_model.reward_kwargs.num_processes"
    )


_open_pools: weakref.WeakSet[DeadlinePool] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_open_pools):
        pool.close()
