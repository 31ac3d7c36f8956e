"""GSM8K: the number after the last `####` (strict), or the last number of the text (flexible).

`strict` compares text, as published results do: `####42` and `#### 42.` are not answers.
"""

from __future__ import annotations

import contextlib
import re
from decimal import Decimal, InvalidOperation

from hone.rewards.ground_truth import as_answer
from hone.types import JsonValue

TAIL_CHARS = 300
"""Only the end of a response is read, which has the answer; this limits the time of the regexes."""

_STRICT_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|-?[0-9]*\.?[0-9]+")
_GROUPED_NUMBER = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?")


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """Returns the number that the response answers, as text without thousands separators, or None."""
    tail = solution_str[-TAIL_CHARS:]
    if method == "strict":
        numbers = [text for text in _STRICT_ANSWER.findall(tail) if any(map(str.isdigit, text))]
    elif method == "flexible":
        numbers = _NUMBER.findall(tail)
    else:
        raise ValueError(f"gsm8k method={method!r} is not known; use 'strict' or 'flexible'")
    return _remove_commas(numbers[-1]) if numbers else None


def compute_score(
    solution_str: str,
    ground_truth: JsonValue,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Returns `score` for a right answer, `format_score` for a wrong one, 0 without an answer."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    expected = _remove_commas(as_answer(ground_truth).strip())
    if answer == expected:
        return score
    with contextlib.suppress(InvalidOperation):  # the ground truth may be no number
        if method == "flexible" and Decimal(answer) == Decimal(expected):
            return score
    return format_score


def _remove_commas(number: str) -> str:
    """Removes thousands separators; returns `42,43`, which is not one number, unchanged."""
    number = number.rstrip(",")
    return number.replace(",", "") if _GROUPED_NUMBER.fullmatch(number) else number
