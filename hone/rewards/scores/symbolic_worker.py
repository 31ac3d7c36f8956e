"""The process that compares expressions: math-verify under memory and CPU time limits.

A comparison that exceeds its time is interrupted, and the process continues with the next. If it cannot
be interrupted (a single huge operation inside C code), the kernel kills the process shortly after.
"""

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
GRACE_CPU_S = 0.5
"""CPU time between the interrupt and the kernel's kill."""
_TYPICAL = (
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt 3}"),
    (r"\{2,1\}", r"\{1,2\}"),
    ("(1,2)", "(1,3)"),
    ("[0,1)", r"(-\infty,1]"),
    (r"x^2+2x+1", r"(x+1)^2"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
    (r"x=2\text{ or }x=3", "2,3"),
    (r"\sin(\pi/3)+e^{2}", r"\log_2 8"),
)
"""Compared once at startup, because the first comparison of a kind is many times slower."""


class _TooLate(BaseException):
    """Raised when time is up; not an Exception, because sympy catches those in many places."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _TooLate


def make_verifier() -> Callable[..., bool | None]:
    """Limit memory, load math-verify and return the comparison, which returns None on a timeout."""
    from math_verify import LatexExtractionConfig, parse, verify

    limit = MEMORY_LIMIT_MB << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    latex = [LatexExtractionConfig()]
    signal.signal(signal.SIGPROF, _interrupt)
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)

    def read(text: str) -> list[Basic | str]:
        return parse(rf"\boxed{{{text}}}", extraction_config=latex, parsing_timeout=None)

    def equal(answer: str, truth: str, cpu_s: float) -> bool | None:
        try:
            # The timer repeats, because a bare `except` may catch the first signal.
            signal.setitimer(signal.ITIMER_PROF, cpu_s, cpu_s)
            signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s + GRACE_CPU_S)
            try:
                return bool(verify(read(truth), read(answer), timeout_seconds=None))
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0.0)
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        except _TooLate:
            return None

    for answer, truth in _TYPICAL:
        equal(answer, truth, cpu_s=10.0)
    return equal
