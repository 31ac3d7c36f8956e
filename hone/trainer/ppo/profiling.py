"""`global_profiler`: which steps are recorded, on every rank, and the start of a run under nsys."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from hone.config.trainer import GlobalProfilerConfig
from hone.controller import Role, WorkerGroup, profiling
from hone.controller.worker import Worker
from hone.tracking.console import screen
from hone.trainer.ppo.memory import memory_explained

UNDER_NSYS = "NSYS_PROFILING_SESSION_ID"
"""nsys sets it for the programs that it runs."""


class StepProfiler:
    """Records the steps that were listed, in every process that plays a role."""

    def __init__(
        self, config: GlobalProfilerConfig, groups: Mapping[Role, WorkerGroup[Worker]]
    ) -> None:
        self._config = config
        self._groups = groups

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record what happens inside, where this step is listed; a step that fails leaves no file.
        One that finds no memory says what would need less."""
        config = self._config
        with memory_explained(f"step {number}"):
            if number in (config.steps or ()) and config.tool is not None:
                with self._recorded(config.tool, number):
                    yield
            else:
                yield

    @contextmanager
    def _recorded(self, tool: str, number: int) -> Iterator[None]:
        for role, group in self._groups.items():
            group.call(Worker.start_profile, tool, number, str(role))
        try:
            yield
        except BaseException:
            profiling.discard()
            raise
        for group in self._groups.values():
            group.call(Worker.stop_profile, self._config.save_path)
        if tool == "torch":
            screen().line(f"step {number}: traces in {self._config.save_path}")


def start_again_under_nsys(config: GlobalProfilerConfig, arguments: Sequence[str]) -> None:
    """Replace this process by itself under nsys, where steps are listed and nsys is there.

    Only a process that was started with these arguments can be: a caller's own is left alone.
    """
    whole = sys.orig_argv[1:]
    if not config.steps or UNDER_NSYS in os.environ:
        return
    if shutil.which("nsys") is None or whole[len(whole) - len(arguments) :] != list(arguments):
        why = "nsys is not on PATH" if shutil.which("nsys") is None else "start Python under nsys"
        screen().line(f"global_profiler.tool=nsys: {why}; nothing is recorded")
        return
    os.makedirs(config.save_path, exist_ok=True)
    options = {"capture-range": "cudaProfilerApi", "capture-range-end": "repeat"}
    options |= {"output": f"{config.save_path}/%q{{HOSTNAME}}-%p"} | config.nsys_options
    words = [f"--{name}={value}" for name, value in options.items()]
    os.execvp("nsys", ["nsys", "profile", *words, sys.executable, *whole])
