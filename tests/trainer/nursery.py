"""A process that has imported everything and forks a run for each line it reads.

Twenty starts would cost minutes of imports; a forked run is as real, and as mortal. Each line in is a
JSON list of overrides; out come the run's process id and, when it has ended, how.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any


class Nursery:
    """The test's side: `run` a command, `kill` it when a moment has come."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )
        self._read = b""

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def run(self, overrides: Sequence[str]) -> int:
        """To the end; the exit code."""
        self.start(overrides)
        return self.exit_code()

    def run_and_kill(
        self, overrides: Sequence[str], moment: Callable[[], bool], delay_s: float
    ) -> bool:
        """Kill -9 when the moment has come; False where the run ended before (and well)."""
        pid = self.start(overrides)
        while not self.has_ended():
            if moment():
                time.sleep(delay_s)
                if self.has_ended():
                    break
                os.kill(pid, 9)
                return self.exit_code() == -9
        assert self.exit_code() == 0
        return False

    def start(self, overrides: Sequence[str]) -> int:
        """The process id of a new run."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(list(overrides)).encode() + b"\n")
        self._process.stdin.flush()
        return int(self._line())

    def exit_code(self) -> int:
        """How the run ended; waits for it."""
        return int(self._line())

    def has_ended(self) -> bool:
        """Looks for some milliseconds."""
        return b"\n" in self._read or bool(select.select([self._process.stdout], [], [], 0.002)[0])

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._read:
            message = os.read(self._process.stdout.fileno(), 1 << 16)
            assert message, "the nursery died; its last words are on stderr"
            self._read += message
        line, _, self._read = self._read.partition(b"\n")
        return line


def _train(overrides: list[str]) -> None:
    from hone.trainer.main_ppo import run
    from hone.verl.dialect import load_config

    run(load_config(overrides))


def main() -> None:
    import pyarrow.parquet
    import torch.distributed.checkpoint
    import transformers

    import hone.trainer.ppo.trainer
    import hone.verl.actor_rollout_ref
    import hone.workers.actor
    from hone.trainer.command_line import run_program

    loaded: list[Any] = [pyarrow, torch, transformers.AutoModelForCausalLM, hone]
    assert loaded
    message = os.dup(1)
    os.dup2(2, 1)  # whatever a run prints is no answer
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = run_program(partial(_train, json.loads(line)))
            except SystemExit as stopped:
                code = int(stopped.code or 0)
            except BaseException:  # a child must never go on with the loop
                traceback.print_exc()
            os._exit(code)
        os.write(message, f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        os.write(message, f"{os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    main()
