r"""MATH: the last `\boxed{…}` equals the reference, as text, as a number, or as mathematics.

Text and numbers are compared here; only what remains open goes to the symbolic check, which runs
under a hard limit in another process.
"""

from __future__ import annotations

from typing import Any

from hone.rewards.scores.latex import (
    as_number,
    boxed_answer,
    last_boxed_only_string,
    remove_boxed,
    strip_string,
)
from hone.rewards.scores.symbolic import symbolically_equal

__all__ = [
    "compute_score",
    "is_equiv",
    "last_boxed_only_string",
    "remove_boxed",
    "strip_string",
]


def compute_score(solution_str: str, ground_truth: Any, symbolic: bool = True) -> float:
    """1.0 if the boxed answer is right, else 0.0."""
    answer = boxed_answer(solution_str)
    if answer is None:
        return 0.0
    return float(is_equiv(answer, str(ground_truth), symbolic=symbolic))


def is_equiv(str1: str | None, str2: str | None, *, symbolic: bool = True) -> bool:
    """Whether answer `str1` equals reference `str2`; an empty answer equals nothing."""
    if str1 is None or str2 is None:
        return False
    answer, truth = strip_string(str1), strip_string(str2)
    if not answer or answer == truth:
        return bool(answer)
    left, right = as_number(answer), as_number(truth)
    if left is not None and right is not None:
        return left == right
    return symbolic and symbolically_equal(str1.strip(), str2.strip())
