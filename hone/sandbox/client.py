"""The caller's side: run a program in a box and wait for the verdict.

One warden a process, started on first use and shared by all threads; a killed one is replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hone.sandbox.box import SETUP_S
from hone.sandbox.plan import Order, Plan
from hone.sandbox.result import Job, SandboxError, SandboxResult, Status
from hone.sandbox.warden import MAX_MESSAGE

log = logging.getLogger(__name__)

_GRACE_S = 30.0  # beyond a run's own deadline, before we give up on the warden
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); sys.argv = sys.argv[1:];"
    " from hone.sandbox.warden import main; main(int(sys.argv[1]))"
)
_SEALS = 0x0008 | 0x0004 | 0x0002 | 0x0001  # F_SEAL_WRITE | GROW | SHRINK | SEAL
_ADD_SEALS = 1033


class WardenHandle:
    """Starts the warden when first needed; sends it orders."""

    def __init__(self) -> None:
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
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, root, str(theirs.fileno())],
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
            self._control = None
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_GRACE_S)
        self._process = None


_warden = WardenHandle()


def run_job(job: Job, plan: Plan) -> SandboxResult:
    """One run under a given plan. SandboxError when the box, not the program, failed."""
    message = Order.of(job, plan).to_json()
    if len(message) > MAX_MESSAGE:
        raise ValueError(f"sandbox: argv is too long ({len(message)} bytes); pass it by stdin")
    ours, theirs = socket.socketpair()
    descriptors = [theirs.fileno()]
    try:
        for text in (job.stdin, job.code, *job.files.values()):
            descriptors.append(_sealed(text))
        _warden.send(message, descriptors)
    finally:
        theirs.close()
        for descriptor in descriptors[1:]:
            os.close(descriptor)
    with ours:
        ours.settimeout(SETUP_S + job.timeout_s + _GRACE_S)
        return _parse(_receive(ours))


def close() -> None:
    """End the warden of this process; the next run starts another."""
    _warden.close()


def _sealed(text: str) -> int:
    """The text as a file in memory that nobody can change."""
    descriptor = os.memfd_create("hone-text", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Lone surrogates do occur in model text; Python source cannot hold them, stdin may.
        view = memoryview(text.encode(errors="surrogatepass"))
        while view:
            view = view[os.write(descriptor, view) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _receive(connection: socket.socket) -> bytes:
    chunks = []
    try:
        while chunk := connection.recv(1 << 16):
            chunks.append(chunk)
    except TimeoutError as error:
        raise SandboxError("sandbox: the warden did not answer before its deadline") from error
    return b"".join(chunks)


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
