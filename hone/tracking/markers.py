"""Timers and markers under verl's names, for loops and workers that were written for it.

`simple_timer` measures. Markers of profilers and traces change nothing: `global_profiler` and the run
folder hold what verl's write elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, MutableMapping
from typing import ParamSpec, TypeVar

from hone.types import Function, JsonValue

F = TypeVar("F", bound=Function)
P = ParamSpec("P")
R = TypeVar("R")


@contextlib.contextmanager
def simple_timer(name: str, timing_raw: MutableMapping[str, float]) -> Iterator[None]:
    """Add the seconds inside to `timing_raw[name]`, also when it ends in an exception."""
    started = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - started


def marked_timer(
    name: str,
    timing_raw: MutableMapping[str, float],
    color: str | None = None,
    domain: str | None = None,
    category: str | None = None,
) -> contextlib.AbstractContextManager[None]:
    """`simple_timer`; what a profiler would draw of it is left out."""
    return simple_timer(name, timing_raw)


def mark_start_range(message: str | None = None, **options: JsonValue) -> None:
    """Nothing: ranges are drawn by the profiler of `global_profiler`."""


def mark_end_range(range_id: str | None = None) -> None:
    """Nothing, as `mark_start_range`."""


def mark_annotate(message: str | None = None, **options: JsonValue) -> Callable[[F], F]:
    """Decorator: the function itself."""
    return lambda function: function


class DistProfiler:
    """The decorator of workers' methods, which the profiler of `global_profiler` does not need."""

    @staticmethod
    def annotate(message: str | None = None, **options: JsonValue) -> Callable[[F], F]:
        """Decorator: the method itself."""
        return mark_annotate(message, **options)


def rollout_trace_op(function: F) -> F:
    """Decorator: the function itself; the run folder keeps every trajectory."""
    return function


@contextlib.contextmanager
def rollout_trace_attr(**attributes: JsonValue) -> Iterator[None]:
    """Nothing around the block."""
    yield


def log_gpu_memory_usage(
    head: str, logger: logging.Logger | None = None, level: int = logging.DEBUG, rank: int = 0
) -> None:
    """Log how much memory of the CUDA device is used; nothing without one."""
    import torch

    if torch.cuda.is_available():
        used, held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        line = f"{head}, memory allocated (GB): {used / 2**30:.2f}, reserved: {held / 2**30:.2f}"
        (logger or logging.getLogger(__name__)).log(level, line)


class GPUMemoryLogger:
    """Decorator: log the memory of the CUDA device before and after a method."""

    def __init__(
        self,
        role: str,
        logger: logging.Logger | None = None,
        level: int = logging.DEBUG,
        log_only_rank_0: bool = True,
    ) -> None:
        self._role, self._logger, self._level = role, logger, level

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        import functools

        @functools.wraps(function)
        def logged(*arguments: P.args, **options: P.kwargs) -> R:
            where = f"{self._role} {function.__name__}"
            log_gpu_memory_usage(f"Before {where}", self._logger, self._level)
            result = function(*arguments, **options)
            log_gpu_memory_usage(f"After {where}", self._logger, self._level)
            return result

        return logged
