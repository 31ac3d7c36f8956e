"""Arithmetic problems whose answer is one integer in the last `<answer>`.

`compat=True` gives TinyZero's scores, which need an `Assistant:` marker before the answer.
"""

from __future__ import annotations

import re

from hone.rewards.ground_truth import as_integer
from hone.rewards.scorer import all_answers, last_answer
from hone.types import JsonValue

_INTEGER = re.compile(r"[+-]?(?:\d{1,64}|\d{1,3}(?:,\d{3}){1,20})", re.ASCII)


def extract_solution(solution_str: str, *, compat: bool = False) -> int | None:
    """Returns the integer in the last answer, or None."""
    if compat:
        _, marker, text = solution_str.partition("Assistant:")
        lines = text.split("\n") if marker else []
        answers = [answer for line in lines for answer in all_answers(line)]  # of single lines
        answer = answers[-1] if answers else None
    else:
        answer = last_answer(solution_str)
    if answer is None or not _INTEGER.fullmatch(answer) or (compat and "," in answer):
        return None
    return int(answer.replace(",", ""))


def compute_score(
    solution_str: str,
    ground_truth: JsonValue,
    method: str = "strict",  # ignored; part of verl's signature
    format_score: float = 0.1,
    score: float = 1.0,
    *,
    compat: bool = False,
) -> float:
    """Returns `score` for the right integer, `format_score` for another, 0 without an answer."""
    answer = extract_solution(solution_str, compat=compat)
    if answer is None:
        return 0.0
    return score if answer == as_integer(ground_truth, "the number") else format_score
