"""Countdown: the last `<answer>` must combine all numbers, each once, with + - * / to reach the target.

`compat=True` gives TinyZero's scores, including its quirks (last line only, `**`, `//`, floats).
"""

from __future__ import annotations

import re
from collections import Counter

from hone.rewards.expressions import ExpressionError, evaluate, evaluate_like_python
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
    """Returns the expression in the last answer, or None.

    With `assistant_marker` (by default `compat`), an answer needs a marker before it.
    """
    text = solution_str
    needs_marker = compat if assistant_marker is None else assistant_marker
    if needs_marker:
        markers = [marker for marker in _ASSISTANT_MARKERS if marker in text]
        if not markers:
            return None
        text = text.split(markers[0], 1)[1]
    if compat or last_line_only:
        text = text.split("\n")[-1]
    if not compat:
        return last_answer(text)
    answers = all_answers(text)
    return answers[-1] if answers else None


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
    """Returns `score` for a right answer, `format_score` for a wrong answer, 0 without an answer."""
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
            is_right = abs(evaluate_like_python(answer) - target) < _COMPAT_TOLERANCE
        else:
            result = evaluate(answer)
            used_numbers = list(result.numbers)
            is_right = result.value == target
    except ExpressionError:
        return format_score
    if require_all:
        is_right = is_right and sorted(used_numbers) == sorted(numbers)
    else:
        is_right = is_right and bool(used_numbers) and not Counter(used_numbers) - Counter(numbers)
    return score if is_right else format_score
