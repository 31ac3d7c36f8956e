"""Profiles the steps listed in `global_profiler`, on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hone.config.trainer import GlobalProfilerConfig
from hone.controller import Role, WorkerGroup, profiling
from hone.controller.worker import Worker
from hone.tracking.console import screen
from hone.trainer.ppo.memory import memory_explained


class StepProfiler:
    """Profiles the listed steps in every worker process."""

    def __init__(
        self, config: GlobalProfilerConfig, groups: Mapping[Role, WorkerGroup[Worker]]
    ) -> None:
        self._config = config
        self._groups = groups

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the enclosed block if this step is listed; a failed step writes no file."""
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
