"""The process that compares expressions with math-verify, within limits on memory and CPU time."""

from __future__ import annotations

import logging
import resource
import signal
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sympy import Basic

MEMORY_LIMIT_MB = 2048
GRACE_CPU_S = 0.5  # CPU time between the interrupt and SIGVTALRM, which kills the process
_WARM_UP_PAIRS = (
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt 3}"),
    (r"\{2,1\}", r"\{1,2\}"),
    ("(1,2)", "(1,3)"),
    ("[0,1)", r"(-\infty,1]"),
    (r"x^2+2x+1", r"(x+1)^2"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
    (r"x=2\text{ or }x=3", "2,3"),
    (r"\sin(\pi/3)+e^{2}", r"\log_2 8"),
)
"""Pairs that are compared at startup, because the first comparison of each kind is slow."""


class _CpuTimeExceeded(BaseException):
    """Raised when the CPU time is used up; a BaseException, because sympy catches Exceptions."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _CpuTimeExceeded


def make_verifier() -> Callable[..., bool | None]:
    """Returns a function that compares two answers; the function returns None if the CPU time is used up."""
    from math_verify import LatexExtractionConfig, parse, verify

    limit = MEMORY_LIMIT_MB << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    latex = [LatexExtractionConfig()]
    signal.signal(signal.SIGPROF, _interrupt)
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)

    def parse_answer(text: str) -> list[Basic | str]:
        return parse(rf"\boxed{{{text}}}", extraction_config=latex, parsing_timeout=None)

    def is_equal(answer: str, truth: str, cpu_s: float) -> bool | None:
        try:
            # The timer repeats, because a bare `except` may catch the first exception.
            signal.setitimer(signal.ITIMER_PROF, cpu_s, cpu_s)
            signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s + GRACE_CPU_S)
            try:
                return bool(verify(parse_answer(truth), parse_answer(answer), timeout_seconds=None))
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0.0)
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        except _CpuTimeExceeded:
            return None

    for answer, truth in _WARM_UP_PAIRS:
        is_equal(answer, truth, cpu_s=10.0)
    return is_equal
