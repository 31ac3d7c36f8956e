"""Countdown: combine all given numbers, each once, by + - * / to reach the target.

The default reads the last `<answer>` anywhere in the response and computes exact fractions.
`compat=True` gives TinyZero's scores, its accidents included (last line only, `**`, `//`).
"""

from __future__ import annotations

import re

from hone.rewards import ground_truth as truth
from hone.rewards.expressions import Evaluated, ExpressionError, evaluate, evaluate_compat
from hone.rewards.scores.answer_tag import all_answers, last_answer
from hone.types import JsonValue

_MARKERS = ("Assistant:", "<|im_start|>assistant")
_COMPAT_TOLERANCE = 1e-5


def extract_solution(
    solution_str: str,
    *,
    compat: bool = False,
    last_line_only: bool = False,
    assistant_marker: bool | None = None,
) -> str | None:
    """The expression the model gave, or None. `assistant_marker=None` means as `compat`."""
    text = solution_str
    if compat if assistant_marker is None else assistant_marker:
        marker = next((m for m in _MARKERS if m in text), None)
        if marker is None:
            return None
        text = text.split(marker, 1)[1]
    if compat or last_line_only:
        text = text.split("\n")[-1]
    if not compat:
        return last_answer(text)
    found = all_answers(text)
    return found[-1] if found else None


def compute_score(
    solution_str: str,
    ground_truth: JsonValue,
    method: str = "strict",
    format_score: float = 0.1,
    score: float = 1.0,
    *,
    compat: bool = False,
    last_line_only: bool = False,
    assistant_marker: bool | None = None,
    require_all: bool = True,
) -> float:
    """`score` if right, `format_score` for any other tagged answer, 0 without one.

    `method` is accepted because verl's signature has it; there is one method.
    """
    given = truth.mapping(ground_truth, "target", "numbers")
    target = truth.integer(given["target"], "target")
    numbers = truth.integers(given["numbers"], "numbers")
    answer = extract_solution(
        solution_str,
        compat=compat,
        last_line_only=last_line_only,
        assistant_marker=assistant_marker,
    )
    if answer is None:
        return 0.0
    right = _right_compat if compat else _right
    try:
        return score if right(answer, target, numbers, require_all) else format_score
    except ExpressionError:
        return format_score


def _right(answer: str, target: int, numbers: list[int], require_all: bool) -> bool:
    found: Evaluated = evaluate(answer)
    return found.value == target and _numbers_allowed(list(found.numbers), numbers, require_all)


def _right_compat(answer: str, target: int, numbers: list[int], require_all: bool) -> bool:
    written = [int(run) for run in re.findall(r"\d+", answer[:1024])]
    if not _numbers_allowed(written, numbers, require_all):
        return False
    return abs(evaluate_compat(answer) - target) < _COMPAT_TOLERANCE


def _numbers_allowed(written: list[int], given: list[int], require_all: bool) -> bool:
    if require_all:
        return sorted(written) == sorted(given)
    left = list(given)
    for number in written:
        if number not in left:
            return False
        left.remove(number)
    return bool(written)
