"""The caller's side: run a program in a box and wait for the verdict.

One warden a process, started on first use and shared by all threads; a killed one is replaced.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hone.sandbox import sealed
from hone.sandbox.box import SETUP_S
from hone.sandbox.plan import Order, Plan
from hone.sandbox.result import Job, SandboxError, SandboxResult, Status
from hone.sandbox.spares import KEEP_S
from hone.sandbox.warden import LENT, MAX_MESSAGE

log = logging.getLogger(__name__)

_GRACE_S = 30.0  # beyond a run's own deadline, before we give up on the warden
_DYING_S = 5.0  # from a warden's last closed socket to its end, on a busy machine
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); sys.argv = sys.argv[1:];"
    " from hone.sandbox.warden import main; main(int(sys.argv[1]), float(sys.argv[2]))"
)


class WardenHandle:
    """Starts the warden when first needed; sends it orders."""

    def __init__(self, keep_spares_s: float) -> None:
        self.keep_spares_s = keep_spares_s  # read when a warden starts
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def send(self, message: bytes, descriptors: Sequence[int]) -> None:
        with self._lock:
            for attempt in (1, 2):
                control = self._control or self._start()
                try:
                    socket.send_fds(control, [message], descriptors)
                    return
                except (BrokenPipeError, ConnectionResetError):
                    self._drop()
                    if attempt == 2:
                        raise

    def close(self) -> None:
        """End the warden and every box with it."""
        with self._lock:
            self._drop()

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            root = str(Path(__file__).resolve().parents[2])
            arguments = [str(theirs.fileno()), str(self.keep_spares_s)]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, root, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={},
                cwd="/",
                start_new_session=True,
            )
        self._control = ours
        return ours

    def bury(self) -> None:
        """After a reply that never came: if the warden has died, take down what it was building."""
        with self._lock:
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=_DYING_S)
                    self._drop()

    def _drop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if self._process.wait(timeout=_GRACE_S) != 0:
                    _kill_session(self._process.pid)
        self._process = None


def _kill_session(session: int) -> None:
    """Kill every process of a dead warden's session: boxes in their first moments, which bubblewrap
    has not yet bound to their parent's life. Its number cannot be in use again while one is left."""
    found = True
    while found:
        found = False
        for name in os.listdir("/proc"):
            with contextlib.suppress(ProcessLookupError, PermissionError, ValueError):
                if os.getsid(int(name)) == session and _alive(name):
                    os.kill(int(name), signal.SIGKILL)
                    found = True


def _alive(pid: str) -> bool:
    return os.path.exists(f"/proc/{pid}/exe")  # a zombie has none


_warden = WardenHandle(KEEP_S)


def run_job(job: Job, plan: Plan) -> SandboxResult:
    """One run under a given plan. SandboxError when the box, not the program, failed."""
    message = Order.of(job, plan).to_json()
    if len(message) > MAX_MESSAGE:
        raise ValueError(f"sandbox: argv is too long ({len(message)} bytes); pass it by stdin")
    ours, theirs = socket.socketpair()
    descriptors = [theirs.fileno()]
    try:
        for text in (job.stdin, job.code, *job.files.values()):
            descriptors.append(sealed.write(text))
        _warden.send(message, descriptors)
    finally:
        theirs.close()
        for descriptor in descriptors[1:]:
            os.close(descriptor)
    with ours:
        ours.settimeout(SETUP_S + job.timeout_s + _GRACE_S)
        reply = _receive(ours)
    if not reply:
        _warden.bury()
    return _parse(reply)


def close() -> None:
    """End the warden of this process; the next run starts another."""
    _warden.close()


def _receive(connection: socket.socket) -> bytes:
    """The reply; nothing when the warden has died, and then the box is dead too.

    The kernel takes a box down with its warden, but for the moment in which the box is being built:
    so the warden lends us its first process before the program may start.
    """
    lent: list[int] = []
    chunks: list[bytes] = []
    try:
        while True:
            chunk, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 1)
            lent += descriptors
            if not chunk:
                return b"".join(chunks)
            chunks.append(chunk.removeprefix(LENT) if descriptors else chunk)
    except TimeoutError as error:
        raise SandboxError("sandbox: the warden did not answer before its deadline") from error
    finally:
        for process in lent:
            if not any(chunks):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)


def _parse(data: bytes) -> SandboxResult:
    header, _, output = data.partition(b"\n")
    if not header:
        raise SandboxError("sandbox: the warden ended before the run did; run it again")
    facts: dict[str, Any] = json.loads(header)
    if facts["error"]:
        raise SandboxError(f"sandbox: the box could not be built: {facts['error']}")
    stdout, stderr = output[: facts["stdout"]], output[facts["stdout"] :]
    return SandboxResult(
        status=Status(facts["status"]),
        exit_code=facts["exit_code"],
        stdout=stdout.decode(errors="replace"),
        stderr=stderr.decode(errors="replace"),
        wall_s=facts["wall_s"],
    )
