"""verl's timers, markers and loggers; profiler and trace markers do nothing."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from hone.tracking.timer import simple_timer as simple_timer
from hone.types import Function, JsonValue, Settings

F = TypeVar("F", bound=Function)
P = ParamSpec("P")
R = TypeVar("R")


def marked_timer(
    name: str,
    timing_raw: MutableMapping[str, float],
    color: str | None = None,
    domain: str | None = None,
    category: str | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Same as `simple_timer`; adds no profiler range, so color, domain and category have no effect."""
    return simple_timer(name, timing_raw)


def mark_start_range(message: str | None = None, **options: JsonValue) -> None:
    """Does nothing: the profiler of `global_profiler` marks ranges."""


def mark_end_range(range_id: str | None = None) -> None:
    """Does nothing, like `mark_start_range`."""


def mark_annotate(message: str | None = None, **options: JsonValue) -> Callable[[F], F]:
    """Decorator that returns the function itself."""
    return rollout_trace_op


def rollout_trace_op(function: F) -> F:
    """Decorator that returns the function itself."""
    return function


@contextlib.contextmanager
def rollout_trace_attr(**attributes: JsonValue) -> Iterator[None]:
    """Does nothing before or after the block."""
    yield


@dataclass(frozen=True)
class ProfilerConfig:
    """verl's profiler settings for one role."""

    tool: str | None = None
    enable: bool = False
    all_ranks: bool = False
    ranks: list[int] = field(default_factory=list)
    save_path: str | None = None
    tool_config: Settings | None = None


class DistProfiler:
    """verl's per-worker profiler, always disabled; `global_profiler` profiles all workers."""

    def __init__(
        self,
        rank: int,
        config: ProfilerConfig | None = None,
        tool_config: Settings | None = None,
        **options: JsonValue,
    ) -> None:
        if config is not None and config.enable:
            raise NotImplementedError(
                "profilers of single workers are not supported; set global_profiler.steps and "
                "tool=torch"
            )

    def start(self, **options: JsonValue) -> None:
        """Does nothing, like `stop`."""

    stop = start
    annotate = staticmethod(mark_annotate)


class RolloutTraceConfig:
    """verl's trace backend; it sends no traces, and `init` logs a warning if a backend is set."""

    @classmethod
    def init(
        cls,
        project_name: str,
        experiment_name: str,
        backend: str | None,
        token2text: bool = False,
        max_samples_per_step_per_worker: int | None = None,
    ) -> None:
        if backend is not None:
            logging.getLogger(__name__).warning(
                "traces are not sent to %s; the run folder keeps every trajectory, and hone report "
                "shows them",
                backend,
            )

    @staticmethod
    def get_backend() -> None:
        return None

    get_client = reset = get_backend

    @staticmethod
    def enable_token2text() -> bool:
        return False


class LocalLogger:
    """Prints the metrics of a step on one line."""

    def __init__(self, print_to_console: bool = True) -> None:
        self.print_to_console = print_to_console

    def flush(self) -> None:
        """Does nothing: every line is flushed when it is printed."""

    def log(self, data: Mapping[str, JsonValue], step: int) -> None:
        if self.print_to_console:
            parts = [f"{k}:{v}" for k, v in data.items() if isinstance(v, int | float)]
            _print(" - ".join([f"step:{step}", *parts]))


def print_rank_0(message: str) -> None:
    """Prints one line on rank 0 only."""
    print_with_rank(message, int(os.environ.get("RANK", "0")), log_only_rank_0=True)


def print_with_rank(message: str, rank: int = 0, log_only_rank_0: bool = False) -> None:
    """Prints one line that begins with the rank."""
    if rank == 0 or not log_only_rank_0:
        _print(message if log_only_rank_0 else f"[Rank {rank}] {message}")


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def log_with_rank(
    message: str,
    rank: int,
    logger: logging.Logger,
    level: int = logging.INFO,
    log_only_rank_0: bool = False,
) -> None:
    """Logs a message that begins with the rank."""
    if rank == 0 or not log_only_rank_0:
        logger.log(level, "[Rank %d] %s", rank, message)


def log_gpu_memory_usage(
    head: str, logger: logging.Logger | None = None, level: int = logging.DEBUG, rank: int = 0
) -> None:
    """Logs the memory in use on the CUDA device, if there is one."""
    import torch

    if torch.cuda.is_available():
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        sizes_gib = allocated / 2**30, reserved / 2**30
        message = "%s, memory allocated (GB): %.2f, reserved: %.2f"
        (logger or logging.getLogger(__name__)).log(level, message, head, *sizes_gib)


class GPUMemoryLogger:
    """Decorator that logs the memory of the CUDA device before and after a method."""

    def __init__(
        self,
        role: str,
        logger: logging.Logger | None = None,
        level: int = logging.DEBUG,
        log_only_rank_0: bool = True,
    ) -> None:
        self._role, self._logger, self._level = role, logger, level

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call_and_log(*arguments: P.args, **options: P.kwargs) -> R:
            name = f"{self._role} {function.__name__}"
            log_gpu_memory_usage(f"Before {name}", self._logger, self._level)
            result = function(*arguments, **options)
            log_gpu_memory_usage(f"After {name}", self._logger, self._level)
            return result

        return call_and_log
