"""The client side: sends a program to a box and waits for the result.

Each process has one warden, started on first use and shared by all threads. A killed warden is replaced.
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

from hone.sandbox import sealed
from hone.sandbox.box import SETUP_S
from hone.sandbox.cgroups import sweep
from hone.sandbox.plan import Order, Plan
from hone.sandbox.result import Job, NotStarted, SandboxError, SandboxResult
from hone.sandbox.spares import KEEP_S
from hone.sandbox.warden import LENT, MAX_MESSAGE

HANG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR
_ATTEMPTS = 3  # for a box that is killed before its program starts
_GRACE_S = 30.0  # time beyond the run's deadline before the warden counts as stuck
_DYING_S = 5.0  # longest time from a warden's last closed socket to its exit, on a busy machine
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from hone.sandbox.warden import main;"
    " main(int(sys.argv[2]), float(sys.argv[3]))"
)


class HungUp(SandboxError):
    """The caller of the run closed its connection."""


def wait_for(connection: socket.socket, timeout_s: float, caller: socket.socket | None) -> None:
    """Wait for data on the connection. Raises HungUp if the caller disconnects first, else TimeoutError."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if caller is not None:
        poll.register(caller, HANG_UP)
    ready = [descriptor for descriptor, _ in poll.poll(1000 * timeout_s)]
    if connection.fileno() in ready:
        return
    if ready:
        raise HungUp("sandbox: the caller hung up; the run was ended")
    raise TimeoutError


class WardenHandle:
    """Starts the warden on first use and sends it orders."""

    def __init__(self, keep_spares_s: float) -> None:
        self.keep_spares_s = keep_spares_s  # read when a warden starts
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
                            f"sandbox: the warden ended {attempt} times while it started; look for"
                            " what kills it (memory, a supervisor)"
                        ) from error

    def close(self) -> None:
        """End the warden and all of its boxes."""
        with self._lock:
            self._drop()

    def drop_if_dead(self) -> None:
        """If the warden has died, kill the boxes that it was building."""
        with self._lock:
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=_DYING_S)
                    self._drop()

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            root = str(Path(__file__).resolve().parents[2])
            arguments = [root, str(theirs.fileno()), str(self.keep_spares_s)]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, *arguments],
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
    """Kill a dead warden's session: boxes that bubblewrap has not yet tied to their parent's lifetime.
    The kernel does not reuse the session's number while a member is left."""
    alive = True
    while alive:
        alive = False
        for name in os.listdir("/proc"):
            with contextlib.suppress(ProcessLookupError, PermissionError, ValueError):
                if os.getsid(int(name)) == session and os.path.exists(f"/proc/{name}/exe"):
                    os.kill(int(name), signal.SIGKILL)  # zombies have no exe
                    alive = True


_warden = WardenHandle(KEEP_S)


def run_job(job: Job, plan: Plan, caller: socket.socket | None = None) -> SandboxResult:
    """Run one job. Raises SandboxError when the box failed, not the program.

    caller: the run is ended (HungUp) when this connection closes.
    """
    with Run(job, plan, caller=caller) as run:
        return run.result()


def close() -> None:
    """End the warden of this process; the next run starts a new one."""
    _warden.close()


class Run:
    """A run in progress, ended by leaving the `with` block. A box that fails to start is retried."""

    def __init__(
        self, job: Job, plan: Plan, *, channel: bool = False, caller: socket.socket | None = None
    ) -> None:
        self._job, self._plan, self._caller = job, plan, caller
        self._message = pickle.dumps(Order.of(job, plan, channel=channel))
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
        """Close the run's connection and descriptors, which ends a run in progress."""
        self._connection.close()
        while self._lent:
            os.close(self._lent.pop())

    def channel(self) -> int:
        """Returns the other end of the program's standard input; call it once and close the descriptor."""
        while True:
            while not self._started and self._receive():
                pass
            if self._started:
                return self._lent.pop()
            self._settle()

    def result(self) -> SandboxResult:
        """Wait for the result."""
        while True:
            while self._receive():
                pass
            result = self._settle()
            if result is not None:
                return result

    def _start(self) -> None:
        self._attempt += 1
        self._started = False
        self._lent: list[int] = []
        self._chunks: list[bytes] = []
        self._connection, theirs = socket.socketpair()
        descriptors = [theirs.detach()]
        try:
            for text in (self._job.stdin, self._job.code, *self._job.files.values()):
                descriptors.append(sealed.write(text))
            _warden.send(self._message, descriptors)
        except BaseException:
            self._connection.close()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _receive(self) -> bool:
        """Receive a part of the reply; returns False at its end.

        The kernel kills a box when its warden dies, except while the box is being built. The warden therefore
        sends us a descriptor of the box's first process before the program starts.
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
        self._lent += descriptors
        self._started |= bool(descriptors)
        self._chunks.append(chunk.removeprefix(LENT) if descriptors else chunk)
        return bool(chunk)

    def _settle(self) -> SandboxResult | None:
        """Returns the result in the reply, or None when the run was restarted."""
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
        verdict: SandboxResult = answer
        return verdict

    def _clean_up(self) -> SandboxError:
        """Kill the box of a dead warden; the returned error tells whether its program had started."""
        for process in self._lent[:1]:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        _warden.drop_if_dead()
        if self._plan.cgroup is not None:
            sweep(self._plan.cgroup)
        if self._started or self._plan.bwrap is None:
            return SandboxError("sandbox: the warden ended before the run did; run it again")
        return NotStarted("sandbox: the warden was killed while it built the box; try again")
