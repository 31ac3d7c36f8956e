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

from hone.engine.rendezvous import STORE_FILE_VARIABLE
from hone.errors import UserError
from hone.trainer.interrupt import mark_as_rank, signal_exit_code, signal_handler

LAUNCHER_PID_VARIABLE = "HONE_LAUNCHER_PID"
GRACE_S = 3.0
"""Seconds that the other ranks get to exit after a rank has failed; then they are killed."""
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


class LaunchError(UserError, ValueError):
    """Raised when the running ranks do not match the configuration, or a rank failed."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process and the number of ranks, in total and on this machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @staticmethod
    def from_env() -> Ranks:
        """Reads the launcher's environment variables; without a launcher there is one rank."""
        get = os.environ.get
        world_size = int(get("WORLD_SIZE", 1))
        local_rank = int(get("LOCAL_RANK", 0))
        local_world_size = int(get("LOCAL_WORLD_SIZE", world_size))
        return Ranks(int(get("RANK", 0)), world_size, local_rank, local_world_size)

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
    """Sums each value over the ranks of the process group; without a group, returns the values."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def must_launch(world_size: int, nnodes: int, module: str) -> bool:
    """Returns whether this process must launch the ranks.

    Raises an error if there are several nodes, or if torchrun has started another number of ranks.
    """
    if "WORLD_SIZE" in os.environ:
        num_started = Ranks.from_env().world_size
        if world_size not in (1, num_started):
            raise LaunchError(
                f"trainer.nnodes x trainer.n_gpus_per_node asks for {world_size} ranks, but {num_started} "
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


def launch(num_ranks: int, module: str, arguments: Sequence[str]) -> None:
    """Runs `python -m module arguments` as `num_ranks` ranks on this machine, and waits for all of them."""
    with tempfile.TemporaryDirectory(prefix="hone-ranks-") as folder:
        environments = [
            _environment(rank, num_ranks, Path(folder) / "store") for rank in range(num_ranks)
        ]
        processes = _Processes()
        exit_codes = processes.run([sys.executable, "-m", module, *arguments], environments)
    if processes.stop_signal is not None and any(exit_codes.values()):
        raise SystemExit(signal_exit_code(processes.stop_signal))
    failed_rank = processes.first_failed_rank
    if failed_rank is not None:
        raise LaunchError(
            f"rank {failed_rank} ended with code {exit_codes[failed_rank]}; its message is above"
        )


def run_python(arguments: Sequence[str]) -> tuple[int, bool]:
    """Runs Python with these arguments, and forwards stop signals of this process.

    Returns the exit code, and whether this process received Ctrl-C or SIGTERM.
    """
    processes = _Processes()
    environment = dict(os.environ) | {LAUNCHER_PID_VARIABLE: str(os.getpid())}
    (exit_code,) = processes.run([sys.executable, *arguments], [environment]).values()
    if exit_code < 0:  # a signal ended the process
        exit_code = signal_exit_code(-exit_code)
    return exit_code, processes.stop_signal is not None


def die_with_launcher() -> None:
    """Makes the kernel kill this rank when its launcher exits; exits now if the launcher has exited.

    Does nothing in a process without a launcher.
    """
    launcher_pid = os.environ.pop(LAUNCHER_PID_VARIABLE, None)  # child processes do not inherit it
    if launcher_pid is None:
        return
    mark_as_rank()
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher_pid):
        os._exit(signal_exit_code(signal.SIGKILL))


def _environment(rank: int, num_ranks: int, store_file: Path) -> dict[str, str]:
    """Returns the environment variables of a rank; the user's values have priority over the defaults."""
    rank_variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        STORE_FILE_VARIABLE: str(store_file),
        LAUNCHER_PID_VARIABLE: str(os.getpid()),
    }
    defaults = {"OMP_NUM_THREADS": "1"}
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            defaults |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return defaults | dict(os.environ) | rank_variables


class _Processes:
    """The processes of one command, one per rank.

    `first_failed_rank` is the rank that failed first; `stop_signal` is the signal that was forwarded to all.
    """

    def __init__(self) -> None:
        self.stop_signal: int | None = None
        self.first_failed_rank: int | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._exited_ranks: queue.Queue[int] = queue.Queue()

    def run(self, command: Sequence[str], environments: Sequence[dict[str, str]]) -> dict[int, int]:
        """Runs one process per environment until all exit, and returns their exit codes by rank."""
        try:
            with signal_handler(self._forward_signal):
                for rank, environment in enumerate(environments):
                    self._processes.append(subprocess.Popen(command, env=environment))
                    # `_forward_signal` has not reached a process that was not yet in the list.
                    if self.stop_signal is not None:
                        self._processes[rank].send_signal(self.stop_signal)
                    threading.Thread(target=self._report_exit, args=(rank,), daemon=True).start()
                return self._wait()
        finally:
            self._kill()

    def _report_exit(self, rank: int) -> None:
        """Waits for a process, and puts its rank into the queue of exited ranks."""
        self._processes[rank].wait()
        self._exited_ranks.put(rank)

    def _wait(self) -> dict[int, int]:
        """Waits for all processes; when one has failed, the others are killed after `GRACE_S`."""
        exit_codes: dict[int, int] = {}
        deadline: float | None = None
        while len(exit_codes) < len(self._processes):
            remaining_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                rank = self._exited_ranks.get(timeout=remaining_s)
            except queue.Empty:
                self._kill()
                deadline = None
                continue
            exit_codes[rank] = self._processes[rank].returncode
            if exit_codes[rank] != 0 and self.first_failed_rank is None:
                self.first_failed_rank = rank
                if self.stop_signal is None:
                    deadline = time.monotonic() + GRACE_S
        return exit_codes

    def _kill(self) -> None:
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.kill()

    def _forward_signal(self, signal_number: int, frame: FrameType | None) -> None:
        """Forwards the first Ctrl-C or SIGTERM to every process; kills the processes on the second."""
        if self.stop_signal is not None:
            self._kill()
            raise SystemExit(signal_exit_code(signal_number))
        self.stop_signal = signal_number
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.send_signal(signal_number)
