"""The client of the warden; every process starts a warden for its first run, and replaces a dead warden."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from hone.sandbox.box import SETUP_S
from hone.sandbox.cgroups import remove_stale_cgroups
from hone.sandbox.descriptors import write_sealed
from hone.sandbox.plan import BoxPlan, RunRequest
from hone.sandbox.result import Job, NotStarted, SandboxError, SandboxResult
from hone.sandbox.warden import DESCRIPTORS_MARK, MAX_MESSAGE_BYTES, SPARE_LIFETIME_S
from hone.services.sockets import DISCONNECT_EVENTS

_MAX_ATTEMPTS = 3  # attempts to start a program, if the warden or the box is killed
_GRACE_S = 30.0  # time for the answer of the warden, after the time limit of a run
_EXIT_TIMEOUT_S = 5.0  # a warden closes its sockets before it exits
_ROOT = str(Path(__file__).resolve().parents[2])
_WARDEN_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); from hone.sandbox.warden import main;"
    " main(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))"
)
_GUARD_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); from hone.sandbox.guard import main;"
    " main(int(sys.argv[2]))"
)


class CallerDisconnected(SandboxError):
    """The caller of the run closed its connection."""


def wait_for_data(
    connection: socket.socket, timeout_s: float, caller_socket: socket.socket | None
) -> None:
    """Waits for data on the connection; raises CallerDisconnected or TimeoutError if no data comes."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if caller_socket is not None:
        poll.register(caller_socket, DISCONNECT_EVENTS)
    ready_fds = [descriptor for descriptor, _ in poll.poll(1000 * timeout_s)]
    if connection.fileno() in ready_fds:
        return
    if ready_fds:
        raise CallerDisconnected("sandbox: the caller disconnected; the run was ended")
    raise TimeoutError


class WardenClient:
    """Starts the warden on first use, and sends requests to the warden."""

    def __init__(self, spare_lifetime_s: float) -> None:
        self.spare_lifetime_s = spare_lifetime_s  # of wardens that start later
        self._lock = threading.RLock()
        self._control_socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def send(self, message: bytes, descriptors: Sequence[int]) -> None:
        """Sends a message with descriptors; if the warden has ended, sends it to a new warden."""
        with self._lock:
            for attempt in range(1, _MAX_ATTEMPTS + 1):
                control = self._control_socket or self._start()
                try:
                    socket.send_fds(control, [message], descriptors)
                    return
                except (BrokenPipeError, ConnectionResetError) as error:
                    self.close()
                    if attempt == _MAX_ATTEMPTS:
                        raise SandboxError(
                            f"sandbox: the warden ended {attempt} times while it started; find"
                            " out what kills it, such as the memory limit or a supervisor"
                        ) from error

    def forget(self) -> None:
        """Leaves the warden to the parent process; a forked child starts its own warden."""
        self._lock = threading.RLock()
        if self._control_socket is not None:
            self._control_socket.close()  # the warden ends when no process holds the socket
        self._control_socket = self._process = self._guard = None

    def clean_up_if_dead(self) -> None:
        """If the warden is dead, kills the boxes that it was building."""
        with self._lock:
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=_EXIT_TIMEOUT_S)
                    self.close()

    def _start(self) -> socket.socket:
        control_socket, warden_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        guard_fd, warden_fd = os.pipe()  # the guard reads it until the warden ends
        try:
            warden_fds = [warden_socket.fileno(), warden_fd]
            arguments = [*map(str, warden_fds), str(self.spare_lifetime_s)]
            self._process = _start_program(_WARDEN_PROGRAM, arguments, pass_fds=warden_fds)
            self._guard = _start_program(_GUARD_PROGRAM, [str(self._process.pid)], stdin=guard_fd)
        finally:
            warden_socket.close()
            os.close(guard_fd)
            os.close(warden_fd)
        self._control_socket = control_socket
        return control_socket

    def close(self) -> None:
        """Closes the control socket, which ends the warden; the guard kills the boxes of a failed warden."""
        with self._lock:
            if self._control_socket is not None:
                self._control_socket.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                for process in (self._process, self._guard):
                    if process is not None:
                        process.wait(timeout=_GRACE_S)
            self._control_socket = self._process = self._guard = None


def _start_program(
    program: str,
    arguments: Sequence[str],
    stdin: int = subprocess.DEVNULL,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Starts a Python program in a session of its own, without the environment."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program, _ROOT, *arguments],
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        pass_fds=pass_fds,
        env={},
        cwd="/",
        start_new_session=True,
    )


_warden = WardenClient(SPARE_LIFETIME_S)
os.register_at_fork(after_in_child=_warden.forget)


def run_job(job: Job, plan: BoxPlan, caller_socket: socket.socket | None = None) -> SandboxResult:
    """Runs one job; raises SandboxError if the box fails, CallerDisconnected if `caller_socket` closes."""
    with Run(job, plan, caller_socket=caller_socket) as run:
        return run.result()


close = _warden.close  # ends the warden of this process; the next run starts a new one


class Run:
    """A run in a box; the end of the `with` block ends the run. A box that does not start is replaced."""

    def __init__(
        self,
        job: Job,
        plan: BoxPlan,
        *,
        has_channel: bool = False,
        caller_socket: socket.socket | None = None,
    ) -> None:
        self._job, self._plan, self._caller_socket = job, plan, caller_socket
        self._message = pickle.dumps(RunRequest.from_job(job, plan, has_channel=has_channel))
        if len(self._message) > MAX_MESSAGE_BYTES:
            size = len(self._message)
            raise ValueError(f"sandbox: argv is too long ({size} bytes); pass it by stdin")
        self._attempt = 0
        self._start()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection and the descriptors, which ends the run."""
        with contextlib.suppress(
            OSError
        ):  # the connection is closed already, or the warden is dead
            self._connection.shutdown(socket.SHUT_RDWR)  # a fork may hold the socket too
        self._connection.close()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def take_channel(self) -> int:
        """Returns the other end of the program's standard input, once; the caller closes the descriptor."""
        while True:
            while not self._program_started and self._receive():
                pass
            if self._program_started:
                return self._descriptors.pop()
            self._result_or_restart()

    def result(self) -> SandboxResult:
        """Waits for the result and returns it."""
        while True:
            while self._receive():
                pass
            result = self._result_or_restart()
            if result is not None:
                return result

    def _start(self) -> None:
        self._attempt += 1
        self._program_started = False
        self._descriptors: list[int] = []
        self._reply_chunks: list[bytes] = []
        self._connection, warden_socket = socket.socketpair()
        descriptors = [warden_socket.detach()]
        try:
            for text in (self._job.stdin, self._job.code, *self._job.files.values()):
                descriptors.append(write_sealed(text))
            _warden.send(self._message, descriptors)
        except BaseException:
            self._connection.close()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _receive(self) -> bool:
        """Receives a chunk of the reply; returns False at the end of the reply.

        The kernel kills a box when its warden dies, but not while the warden builds the box. Therefore
        the warden sends a pidfd of the first process in the box before the program starts.
        """
        try:
            wait_for_data(
                self._connection, SETUP_S + self._job.timeout_s + _GRACE_S, self._caller_socket
            )
            chunk, descriptors, _, _ = socket.recv_fds(self._connection, 1 << 16, 2)
        except TimeoutError as error:
            raise SandboxError("sandbox: the warden did not answer in time") from error
        except ConnectionResetError:
            return False
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        self._descriptors += descriptors
        self._program_started |= bool(descriptors)
        self._reply_chunks.append(chunk.removeprefix(DESCRIPTORS_MARK) if descriptors else chunk)
        return bool(chunk)

    def _result_or_restart(self) -> SandboxResult | None:
        """Returns the result in the reply, or restarts the run and returns None."""
        data = b"".join(self._reply_chunks)
        try:
            reply = pickle.loads(data) if data else self._clean_up_after_warden()
        except (pickle.UnpicklingError, EOFError):  # the warden died while it wrote
            reply = self._clean_up_after_warden()
        if isinstance(reply, NotStarted) and self._attempt < _MAX_ATTEMPTS:
            self.close()
            self._start()
            return None
        if isinstance(reply, SandboxError):
            raise reply
        result: SandboxResult = reply
        return result

    def _clean_up_after_warden(self) -> SandboxError:
        """Kills the box of a dead warden and returns the error of the run."""
        for pidfd in self._descriptors[:1]:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        _warden.clean_up_if_dead()
        if self._plan.parent_cgroups is not None:
            remove_stale_cgroups(self._plan.parent_cgroups)
        if self._program_started or self._plan.bwrap_path is None:
            return SandboxError("sandbox: the warden ended before the run did; run it again")
        return NotStarted("sandbox: the warden was killed while it built the box; try again")
