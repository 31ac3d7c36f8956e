"""Countdown: the last `<answer>` must combine all numbers, each once, with + - * / to reach the target.

`compat=True` gives TinyZero's scores, including its quirks (last line only, `**`, `//`, floats).
"""

from __future__ import annotations

import re
from collections import Counter

from hone.rewards.expressions import ExpressionError, evaluate, evaluate_compat
from hone.rewards.ground_truth import as_integer, as_integers, as_mapping
from hone.rewards.scorer import all_answers, last_answer
from hone.types import JsonValue

_ASSISTANT_MARKERS = ("Assistant:", "<|im_start|>assistant")
_COMPAT_TOLERANCE = 1e-5


def extract_solution(
    solution_str: str,
    *,
    compat: bool = False,
    last_line_only: bool = False,
    assistant_marker: bool | None = None,
) -> str | None:
    """Returns the model's expression, or None. `assistant_marker` defaults to `compat`."""
    text = solution_str
    if compat if assistant_marker is None else assistant_marker:
        marker = next((m for m in _ASSISTANT_MARKERS if m in text), None)
        if marker is None:
            return None
        text = text.split(marker, 1)[1]
    if compat or last_line_only:
        text = text.split("\n")[-1]
    if not compat:
        return last_answer(text)
    return next(reversed(all_answers(text)), None)


def compute_score(
    solution_str: str,
    ground_truth: JsonValue,
    method: str = "strict",  # ignored; part of verl's signature
    format_score: float = 0.1,
    score: float = 1.0,
    *,
    compat: bool = False,
    last_line_only: bool = False,
    assistant_marker: bool | None = None,
    require_all: bool = True,
) -> float:
    """Returns `score` for a right answer, `format_score` for another one, 0 without an answer."""
    problem = as_mapping(ground_truth, "target", "numbers")
    target = as_integer(problem["target"], "target")
    numbers = as_integers(problem["numbers"], "numbers")
    answer = extract_solution(
        solution_str,
        compat=compat,
        last_line_only=last_line_only,
        assistant_marker=assistant_marker,
    )
    if answer is None:
        return 0.0
    try:
        if compat:
            used_numbers = [int(digits) for digits in re.findall(r"\d+", answer[:1024])]
            is_right = abs(evaluate_compat(answer) - target) < _COMPAT_TOLERANCE
        else:
            result = evaluate(answer)
            used_numbers, is_right = list(result.numbers), result.value == target
    except ExpressionError:
        return format_score
    if require_all:
        is_right = is_right and sorted(used_numbers) == sorted(numbers)
    else:
        is_right = is_right and bool(used_numbers) and not Counter(used_numbers) - Counter(numbers)
    return score if is_right else format_score
