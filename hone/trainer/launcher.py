"""Start the ranks of a program on this machine, and end them together.

The ranks meet through a file that this user alone can read, and their sockets are bound to loopback. They
die with their launcher, whatever ends it. Leaves out several machines: torchrun does that.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from hone.engine.rendezvous import STORE_FILE
from hone.trainer.interrupt import SIGNALS, answer_to_launcher, exit_code
from hone.trainer.ranks import LaunchError

LAUNCHER_PID = "HONE_LAUNCHER_PID"
GRACE_S = 3.0
"""What the other ranks have to end by themselves after one has failed."""
_SET_PARENT_DEATH_SIGNAL = 1


def launch(count: int, module: str, arguments: Sequence[str]) -> None:
    """Run `python -m module arguments` as `count` ranks of this machine, until all end."""
    with tempfile.TemporaryDirectory(prefix="hone-ranks-") as folder:
        command = [sys.executable, "-m", module, *arguments]
        ranks = _Processes()
        try:
            with ranks.forwarding_signals():
                for rank in range(count):
                    place = _environment(rank, count, Path(folder) / "store")
                    ranks.start(command, place)
                codes = ranks.wait()
        finally:
            ranks.kill()
    if ranks.stopped_by is not None and any(codes.values()):
        raise SystemExit(exit_code(ranks.stopped_by))
    failed = ranks.first_failed
    if failed is not None:
        raise LaunchError(f"rank {failed} ended with code {codes[failed]}; its message is above")


def run_alone(arguments: Sequence[str]) -> tuple[int, bool]:
    """Run Python with these arguments until it ends; its exit code, and whether a signal came."""
    process = _Processes()
    try:
        with process.forwarding_signals():
            environment = dict(os.environ) | {LAUNCHER_PID: str(os.getpid())}
            process.start([sys.executable, *arguments], environment)
            (code,) = process.wait().values()
    finally:
        process.kill()
    return code, process.stopped_by is not None


def die_with_launcher() -> None:
    """In a rank: end when the launcher ends, also where it has ended already."""
    launcher = os.environ.pop(LAUNCHER_PID, None)  # not for the programs that a rank starts itself
    if launcher is None:
        return
    answer_to_launcher()
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):  # it died before the line above
        os._exit(exit_code(signal.SIGKILL))


def _environment(rank: int, count: int, store: Path) -> dict[str, str]:
    place: dict[str, int | Path] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        STORE_FILE: store,
        LAUNCHER_PID: os.getpid(),
    }
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    usual = {"OMP_NUM_THREADS": "1"}
    if loopback is not None:
        usual |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return usual | dict(os.environ) | {name: str(value) for name, value in place.items()}


class _Processes:
    """The ranks that run, and what ended them."""

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        self.first_failed: int | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended: queue.Queue[int] = queue.Queue()

    def start(self, command: Sequence[str], environment: dict[str, str]) -> None:
        rank = len(self._processes)
        process = subprocess.Popen(command, env=environment)
        self._processes.append(process)

        def watch() -> None:
            process.wait()
            self._ended.put(rank)

        threading.Thread(target=watch, name=f"rank-{rank}", daemon=True).start()

    def wait(self) -> dict[int, int]:
        """Exit code per rank. When one fails the others have a moment to tell what they know."""
        codes: dict[int, int] = {}
        ends: float | None = None
        while len(codes) < len(self._processes):
            left_s = None if ends is None else max(0.0, ends - time.monotonic())
            try:
                rank = self._ended.get(timeout=left_s)
            except queue.Empty:
                self.kill()
                ends = None
                continue
            codes[rank] = self._processes[rank].returncode
            if codes[rank] != 0 and self.first_failed is None:
                self.first_failed = rank
                if self.stopped_by is None:
                    ends = time.monotonic() + GRACE_S
        return codes

    def kill(self) -> None:
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.kill()  # nothing where it has ended

    @contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM asks every rank to stop; the second kills them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {n: signal.signal(n, self._forward) for n in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self.stopped_by is not None:
            self.kill()
            raise SystemExit(exit_code(number))
        self.stopped_by = number
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.send_signal(number)
