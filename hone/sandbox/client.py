"""The warden's client: sends a program to a box and waits for the result.

Each process has one warden, which starts on first use and is replaced if it is killed.
"""

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

from hone.sandbox import memfd
from hone.sandbox.box import SETUP_S
from hone.sandbox.cgroups import remove_stale_cgroups
from hone.sandbox.plan import Plan, RunRequest
from hone.sandbox.result import Job, NotStarted, SandboxError, SandboxResult
from hone.sandbox.spares import SPARE_LIFETIME_S
from hone.sandbox.warden import DESCRIPTORS_MARK, MAX_MESSAGE

DISCONNECT_EVENTS = select.POLLRDHUP | select.POLLHUP | select.POLLERR
_ATTEMPTS = 3  # for a box that is killed before its program starts
_GRACE_S = 30.0  # time beyond the run's deadline before the warden counts as stuck
_EXIT_TIMEOUT_S = 5.0  # from a warden's last closed socket to its exit, on a busy machine
_START_WARDEN = (
    "import sys; sys.path.insert(0, sys.argv[1]); from hone.sandbox.warden import main;"
    " main(int(sys.argv[2]), float(sys.argv[3]))"
)


class CallerDisconnected(SandboxError):
    """The caller of the run closed its connection."""


def wait_for(connection: socket.socket, timeout_s: float, caller: socket.socket | None) -> None:
    """Waits for data on the connection; raises CallerDisconnected or TimeoutError if none comes."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if caller is not None:
        poll.register(caller, DISCONNECT_EVENTS)
    ready = [descriptor for descriptor, _ in poll.poll(1000 * timeout_s)]
    if connection.fileno() in ready:
        return
    if ready:
        raise CallerDisconnected("sandbox: the caller disconnected; the run was ended")
    raise TimeoutError


class WardenClient:
    """Starts the warden on first use and sends it requests."""

    def __init__(self, spare_lifetime_s: float) -> None:
        self.spare_lifetime_s = spare_lifetime_s  # read when a warden starts
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def send(self, message: bytes, descriptors: Sequence[int]) -> None:
        with self._lock:
            for attempt in range(1, _ATTEMPTS + 1):
                control = self._control or self._start()
                try:
                    socket.send_fds(control, [message], descriptors)
                    return
                except (BrokenPipeError, ConnectionResetError) as error:
                    self._drop()
                    if attempt == _ATTEMPTS:
                        raise SandboxError(
                            f"sandbox: the warden ended {attempt} times while it started; find"
                            " out what kills it (memory, a supervisor)"
                        ) from error

    def close(self) -> None:
        """Ends the warden and all of its boxes."""
        with self._lock:
            self._drop()

    def drop_if_dead(self) -> None:
        """Kills the boxes that a dead warden was building; does nothing if the warden lives."""
        with self._lock:
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=_EXIT_TIMEOUT_S)
                    self._drop()

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            root = str(Path(__file__).resolve().parents[2])
            arguments = [root, str(theirs.fileno()), str(self.spare_lifetime_s)]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START_WARDEN, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={},
                cwd="/",
                start_new_session=True,
            )
        self._control = ours
        return ours

    def _drop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if self._process.wait(timeout=_GRACE_S) != 0:
                    _kill_session(self._process.pid)
        self._control = self._process = None


def _kill_session(session: int) -> None:
    """Kills the processes of a dead warden's session, which bubblewrap may not have tied to it yet.

    The kernel does not reuse the session's number while a member is left.
    """
    has_members = True
    while has_members:
        has_members = False
        for name in os.listdir("/proc"):
            with contextlib.suppress(ProcessLookupError, PermissionError, ValueError):
                if os.getsid(int(name)) == session and os.path.exists(f"/proc/{name}/exe"):
                    os.kill(int(name), signal.SIGKILL)  # zombies have no exe
                    has_members = True


_warden = WardenClient(SPARE_LIFETIME_S)


def run_job(job: Job, plan: Plan, caller: socket.socket | None = None) -> SandboxResult:
    """Runs one job. Raises SandboxError if the box failed, not the program.

    caller: the run ends with CallerDisconnected if this connection closes.
    """
    with Run(job, plan, caller=caller) as run:
        return run.result()


def close() -> None:
    """Ends the warden of this process; the next run starts a new one."""
    _warden.close()


class Run:
    """A run, ended by leaving the `with` block. A box that fails to start is retried."""

    def __init__(
        self, job: Job, plan: Plan, *, channel: bool = False, caller: socket.socket | None = None
    ) -> None:
        self._job, self._plan, self._caller = job, plan, caller
        self._message = pickle.dumps(RunRequest.from_job(job, plan, channel=channel))
        if len(self._message) > MAX_MESSAGE:
            size = len(self._message)
            raise ValueError(f"sandbox: argv is too long ({size} bytes); pass it by stdin")
        self._attempt = 0
        self._start()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the run's connection and descriptors, which ends a run in progress."""
        self._connection.close()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def channel(self) -> int:
        """Returns our end of the program's standard input. Call it once; the caller closes it."""
        while True:
            while not self._started and self._receive():
                pass
            if self._started:
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
        self._started = False
        self._descriptors: list[int] = []
        self._chunks: list[bytes] = []
        self._connection, theirs = socket.socketpair()
        descriptors = [theirs.detach()]
        try:
            for text in (self._job.stdin, self._job.code, *self._job.files.values()):
                descriptors.append(memfd.write_sealed(text))
            _warden.send(self._message, descriptors)
        except BaseException:
            self._connection.close()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _receive(self) -> bool:
        """Receives a part of the reply; returns False at its end.

        The kernel kills a box when its warden dies, except while the box is being built. Before the
        program starts, the warden therefore sends a pidfd of the box's first process.
        """
        try:
            wait_for(self._connection, SETUP_S + self._job.timeout_s + _GRACE_S, self._caller)
            chunk, descriptors, _, _ = socket.recv_fds(self._connection, 1 << 16, 2)
        except TimeoutError as error:
            raise SandboxError("sandbox: the warden did not answer before its deadline") from error
        except ConnectionResetError:
            return False
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        self._descriptors += descriptors
        self._started |= bool(descriptors)
        self._chunks.append(chunk.removeprefix(DESCRIPTORS_MARK) if descriptors else chunk)
        return bool(chunk)

    def _result_or_restart(self) -> SandboxResult | None:
        """Returns the result in the reply, or None if the run was restarted."""
        reply = b"".join(self._chunks)
        try:
            answer = pickle.loads(reply) if reply else self._clean_up()
        except (pickle.UnpicklingError, EOFError):  # the warden died while it wrote
            answer = self._clean_up()
        if isinstance(answer, NotStarted) and self._attempt < _ATTEMPTS:
            self.close()
            self._start()
            return None
        if isinstance(answer, SandboxError):
            raise answer
        result: SandboxResult = answer
        return result

    def _clean_up(self) -> SandboxError:
        """Kills the box of a dead warden; returns NotStarted if its program had not started."""
        for process in self._descriptors[:1]:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        _warden.drop_if_dead()
        if self._plan.cgroup is not None:
            remove_stale_cgroups(self._plan.cgroup)
        if self._started or self._plan.bwrap is None:
            return SandboxError("sandbox: the warden ended before the run did; run it again")
        return NotStarted("sandbox: the warden was killed while it built the box; try again")
