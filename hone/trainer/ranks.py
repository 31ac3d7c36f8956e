"""The ranks of one program: torchrun starts them, or `launch` where the user only set `n_gpus_per_node`.

The ranks of `launch` meet through a file that this user alone can read, bind their sockets to loopback, and
die with their launcher. Leaves out several machines (torchrun) and sharding the model (the engine).
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
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hone.engine.rendezvous import STORE_FILE
from hone.trainer.interrupt import SIGNALS, answer_to_launcher, exit_code

LAUNCHER_PID = "HONE_LAUNCHER_PID"
GRACE_S = 3.0
"""Time for the other ranks to end by themselves after one has failed."""
_SET_PARENT_DEATH_SIGNAL = 1


class LaunchError(ValueError):
    """The ranks that run are not those that the configuration asks for, or one failed."""


@dataclass(frozen=True)
class Ranks:
    """This process among its peers."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @staticmethod
    def here() -> Ranks:
        """As the launcher set them in the environment; one rank without a launcher."""
        get = os.environ.get
        world_size = int(get("WORLD_SIZE", 1))
        local = int(get("LOCAL_RANK", 0)), int(get("LOCAL_WORLD_SIZE", world_size))
        return Ranks(int(get("RANK", 0)), world_size, *local)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def join(self) -> None:
        """Make the process group of `wait_for_all`; a sharded engine makes its own."""
        if self.world_size > 1:
            import torch

            from hone.engine.sharding import join_group

            join_group(torch.device("cpu"))

    def wait_for_all(self) -> None:
        if self.world_size > 1:
            import torch.distributed as dist

            dist.barrier()

    def leave(self) -> None:
        if self.world_size > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()


def sum_over_ranks(*values: float) -> list[float]:
    """Each value summed over the ranks of the process group, if there is one."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def must_launch(world_size: int, nnodes: int, module: str) -> bool:
    """Whether this process has to start the ranks itself; an error where it cannot."""
    if "WORLD_SIZE" in os.environ:
        running = Ranks.here().world_size
        if world_size not in (1, running):
            raise LaunchError(
                f"trainer.nnodes x trainer.n_gpus_per_node asks for {world_size} ranks, but {running} "
                "were started; leave both at 1 under torchrun, or make them agree"
            )
        return False
    if world_size > 1 and nnodes > 1:
        raise LaunchError(
            f"trainer.nnodes={nnodes}: start the program on every machine with torchrun "
            f"--nnodes={nnodes} --nproc_per_node={world_size // nnodes} --rdzv_endpoint=HOST:PORT "
            f"-m {module} …"
        )
    return world_size > 1


def launch(count: int, module: str, arguments: Sequence[str]) -> None:
    """Run `python -m module arguments` as `count` ranks of this machine, until all end."""
    with tempfile.TemporaryDirectory(prefix="hone-ranks-") as folder:
        places = [_environment(rank, count, Path(folder) / "store") for rank in range(count)]
        ranks = _Processes()
        codes = ranks.run([sys.executable, "-m", module, *arguments], places)
    if ranks.stopped_by is not None and any(codes.values()):
        raise SystemExit(exit_code(ranks.stopped_by))
    failed = ranks.first_failed
    if failed is not None:
        raise LaunchError(f"rank {failed} ended with code {codes[failed]}; its message is above")


def run_alone(arguments: Sequence[str]) -> tuple[int, bool]:
    """Run Python with these arguments; its exit code, and whether a signal came."""
    process = _Processes()
    environment = dict(os.environ) | {LAUNCHER_PID: str(os.getpid())}
    (code,) = process.run([sys.executable, *arguments], [environment]).values()
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
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        STORE_FILE: str(store),
        LAUNCHER_PID: str(os.getpid()),
    }
    defaults = {"OMP_NUM_THREADS": "1"}
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            defaults |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return defaults | dict(os.environ) | place


class _Processes:
    """Processes of one command, and what ended them."""

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        self.first_failed: int | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended: queue.Queue[int] = queue.Queue()

    def run(self, command: Sequence[str], environments: Sequence[dict[str, str]]) -> dict[int, int]:
        """The exit code of each, when all have ended."""
        try:
            with self._forwarding_signals():
                for rank, environment in enumerate(environments):
                    self._processes.append(subprocess.Popen(command, env=environment))
                    watch = threading.Thread(target=self._watch, args=(rank,), daemon=True)
                    watch.start()
                return self._wait()
        finally:
            self._kill()

    def _watch(self, rank: int) -> None:
        self._processes[rank].wait()
        self._ended.put(rank)

    def _wait(self) -> dict[int, int]:
        """When one fails the others have `GRACE_S` to report what they know."""
        codes: dict[int, int] = {}
        deadline: float | None = None
        while len(codes) < len(self._processes):
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                rank = self._ended.get(timeout=left_s)
            except queue.Empty:
                self._kill()
                deadline = None
                continue
            codes[rank] = self._processes[rank].returncode
            if codes[rank] != 0 and self.first_failed is None:
                self.first_failed = rank
                if self.stopped_by is None:
                    deadline = time.monotonic() + GRACE_S
        return codes

    def _kill(self) -> None:
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.kill()

    @contextmanager
    def _forwarding_signals(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM asks every process to stop; the second kills them."""
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
            self._kill()
            raise SystemExit(exit_code(number))
        self.stopped_by = number
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.send_signal(number)
