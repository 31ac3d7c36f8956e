"""Starts the ranks of a program on this machine, for users who set `n_gpus_per_node` without torchrun.

Ranks rendezvous through a file that only this user can read, bind their sockets to loopback, and exit with
their launcher. Several machines need torchrun.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hone.engine.rendezvous import STORE_FILE
from hone.trainer.interrupt import mark_as_rank, signal_exit_code, signal_handler

LAUNCHER_PID = "HONE_LAUNCHER_PID"
GRACE_S = 3.0
"""Time for the other ranks to exit after one has failed, before they are killed."""
_PR_SET_PDEATHSIG = 1


class LaunchError(ValueError):
    """Raised when the running ranks do not match the configuration, or a rank failed."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process and the world size."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @staticmethod
    def from_env() -> Ranks:
        """Reads the launcher's environment variables; without a launcher there is one rank."""
        get = os.environ.get
        world_size = int(get("WORLD_SIZE", 1))
        local = int(get("LOCAL_RANK", 0)), int(get("LOCAL_WORLD_SIZE", world_size))
        return Ranks(int(get("RANK", 0)), world_size, *local)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def init_process_group(self) -> None:
        """Initializes the process group; a sharded training engine does so itself."""
        if self.world_size > 1:
            import torch

            from hone.engine.sharding import join_group

            join_group(torch.device("cpu"))

    def barrier(self) -> None:
        if self.world_size > 1:
            import torch.distributed as dist

            dist.barrier()

    def destroy_process_group(self) -> None:
        if self.world_size > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()


def sum_over_ranks(*values: float) -> list[float]:
    """Sums each value over the ranks of the process group, if there is one."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def must_launch(world_size: int, nnodes: int, module: str) -> bool:
    """Returns whether this process must launch the ranks; raise an error if it cannot."""
    if "WORLD_SIZE" in os.environ:
        running = Ranks.from_env().world_size
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
    """Runs `python -m module arguments` as `count` ranks on this machine and wait for all of them."""
    with tempfile.TemporaryDirectory(prefix="hone-ranks-") as folder:
        environments = [_environment(rank, count, Path(folder) / "store") for rank in range(count)]
        ranks = _Processes()
        codes = ranks.run([sys.executable, "-m", module, *arguments], environments)
    if ranks.stopped_by is not None and any(codes.values()):
        raise SystemExit(signal_exit_code(ranks.stopped_by))
    failed = ranks.first_failed
    if failed is not None:
        raise LaunchError(f"rank {failed} ended with code {codes[failed]}; its message is above")


def run_python(arguments: Sequence[str]) -> tuple[int, bool]:
    """Runs Python with these arguments; return its exit code and whether a signal arrived."""
    process = _Processes()
    environment = dict(os.environ) | {LAUNCHER_PID: str(os.getpid())}
    (code,) = process.run([sys.executable, *arguments], [environment]).values()
    return code, process.stopped_by is not None


def die_with_launcher() -> None:
    """Makes this rank exit when its launcher exits, even if the launcher is already gone."""
    launcher = os.environ.pop(LAUNCHER_PID, None)  # not for child processes
    if launcher is None:
        return
    mark_as_rank()
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):  # it has already exited
        os._exit(signal_exit_code(signal.SIGKILL))


def _environment(rank: int, count: int, store: Path) -> dict[str, str]:
    rank_variables = {
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
    return defaults | dict(os.environ) | rank_variables


class _Processes:
    """The processes of one command, the first that failed, and the signal that stopped them."""

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        self.first_failed: int | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._exited: queue.Queue[int] = queue.Queue()

    def run(self, command: Sequence[str], environments: Sequence[dict[str, str]]) -> dict[int, int]:
        """Runs the processes until all exit, and return the exit code of each."""
        try:
            with signal_handler(self._forward):
                for rank, environment in enumerate(environments):
                    self._processes.append(subprocess.Popen(command, env=environment))
                    watch = threading.Thread(target=self._watch, args=(rank,), daemon=True)
                    watch.start()
                return self._wait()
        finally:
            self._kill()

    def _watch(self, rank: int) -> None:
        self._processes[rank].wait()
        self._exited.put(rank)

    def _wait(self) -> dict[int, int]:
        """Waits for all processes; when one fails, the others have `GRACE_S` to report errors."""
        codes: dict[int, int] = {}
        deadline: float | None = None
        while len(codes) < len(self._processes):
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                rank = self._exited.get(timeout=left_s)
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

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Forwards the first Ctrl-C or SIGTERM to every process; kill them on the second."""
        if self.stopped_by is not None:
            self._kill()
            raise SystemExit(signal_exit_code(number))
        self.stopped_by = number
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.send_signal(number)
