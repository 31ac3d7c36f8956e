"""Scoring processes with hard deadlines: a process that exceeds a deadline is killed and replaced.

Workers are new interpreters without torch, because a fork of a process with threads is unsafe.
pebble is not used: its workers share one pipe, so half an answer stops the run (DESIGN.md §6, Rewards).
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

from hone.errors import UserError
from hone.event_loop import wait_for_result
from hone.rewards.failures import Failed
from hone.text import error_text
from hone.types import Settings

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""A worker imports modules before its first job, which takes long on a busy CPU."""
START_RETRIES = 2  # number of new attempts after a worker that died during its start
MESSAGE_TIMEOUT_S = 60.0
"""A worker that does not read or finish a message for this long counts as dead."""
# Python 3.10 ignores PYTHONSAFEPATH and adds the working directory, whose files would hide modules.
_WORKER_PROGRAM = (
    "import sys; sys.path[:1] = sys.path[:1] if sys.path[0] else [];"
    " import runpy; runpy.run_module('hone.rewards.pool_worker', run_name='__main__')"
)
KILL_TIMEOUT_S = 10.0  # limit on the wait for the end of a killed process

T = TypeVar("T")


class PoolError(UserError, RuntimeError):
    """Workers cannot be started, or the pool is closed."""


_KILLED = Failed("crash", f"the scoring process ended with code {-signal.SIGKILL}")


class _Worker:
    """A process and the socket to it."""

    def __init__(self, factory: str, keywords: Settings) -> None:
        own_socket, worker_socket = socket.socketpair()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            seconds = struct.pack("ll", int(MESSAGE_TIMEOUT_S), 0)
            own_socket.setsockopt(socket.SOL_SOCKET, option, seconds)
        # The new interpreter must find the same modules as this one.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with worker_socket:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _WORKER_PROGRAM, str(worker_socket.fileno())],
                pass_fds=[worker_socket.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
            )
        self.connection = Connection(own_socket.detach())
        with contextlib.suppress(OSError):  # the process has died; `_start` handles this
            self.connection.send_bytes(pickle.dumps((factory, dict(keywords))))

    def kill(self) -> None:
        """Kills the process and all processes of its session."""
        if self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a system call cannot be interrupted
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
        """Returns the answer to each job, or a Failed such as `timeout`, `crash` or `exception`."""
        with self._lock:
            if self._is_closed:
                raise PoolError("the pool is closed; create a new one")
            if self._owner_pid != os.getpid():
                # In a fork, the existing workers answer the parent process; the fork starts its own.
                self._workers, self._idle_workers, self._owner_pid = set(), [], os.getpid()
            self._is_stopping = False
            threads = ThreadPoolExecutor(self.size, thread_name_prefix="hone-score")
            try:
                calls = [threads.submit(self._call, job, timeout_s) for job in jobs]
                return [wait_for_result(call) for call in calls]
            except BaseException:  # a failed start or an interrupt: do not wait for answers
                self._is_stopping = True
                for worker in self._workers - set(self._idle_workers):
                    worker.kill()
                raise
            finally:
                threads.shutdown(cancel_futures=True)

    def _call(self, arguments: Settings, timeout_s: float) -> T | Failed:
        """Returns the answer to a job; a job whose worker is killed is done once more, by another worker."""
        try:
            # `Connection.send` would share the memory of tensors, which needs a child of multiprocessing.
            message = pickle.dumps((dict(arguments), timeout_s))
        except Exception as error:  # pickling an object of the user may raise anything
            return Failed("bad_row", f"cannot be sent to another process: {error_text(error)}")
        answer = self._answer(message, timeout_s)
        # Someone else may have killed the worker, such as the kernel without memory.
        return self._answer(message, timeout_s) if answer is _KILLED else answer

    def _answer(self, message: bytes, timeout_s: float) -> T | Failed:
        """Sends a message to an idle worker, or to a new one, and returns the answer."""
        while True:
            try:
                worker = self._idle_workers.pop()
            except IndexError:
                worker = self._start()
            self._drop_if_stopping(worker)
            try:
                worker.connection.send_bytes(message)
                break
            except OSError:  # the worker died while idle: another worker gets the job
                self._drop(worker)
        try:
            if not worker.connection.poll(timeout_s):
                self._drop(worker)
                return Failed("timeout", f"no score after {timeout_s:g} s; the process was killed")
            answer: T | Failed | BaseException = worker.connection.recv()
        except (EOFError, OSError):
            self._drop(worker)
            code = worker.process.returncode
            if code == -signal.SIGKILL:
                return _KILLED
            return Failed("crash", f"the scoring process ended with code {code}")
        except Exception as error:  # unpickling an object of the user may raise anything
            answer = Failed("bad_return", f"cannot be read in the parent: {error_text(error)}")
        self._idle_workers.append(worker)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _start(self) -> _Worker:
        """Starts a worker and waits until it is ready; replaces a worker that dies START_RETRIES times."""
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
