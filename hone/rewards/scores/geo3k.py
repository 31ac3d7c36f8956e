r"""Geometry3K: 0.9 for the right boxed answer, 0.1 for `<think>…</think>` before it."""

from __future__ import annotations

from hone.rewards.ground_truth import as_answer
from hone.rewards.scores.latex import boxed_answer
from hone.rewards.scores.math_reward import is_equiv
from hone.types import JsonValue


def format_reward(solution_str: str) -> float:
    r"""Returns 1.0 if the text starts with `<think>` and has `</think>…\boxed{…}` after it."""
    if not solution_str.startswith("<think>"):
        return 0.0
    think_end = solution_str.find("</think>")
    box_start = solution_str.find("\\boxed{", think_end) if think_end >= 0 else -1
    return float(box_start >= 0 and solution_str.find("}", box_start) >= 0)


def acc_reward(solution_str: str, ground_truth: JsonValue, use_boxed: bool = True) -> float:
    """Returns 1.0 if the boxed answer (or, without `use_boxed`, the whole text) is right."""
    answer = boxed_answer(solution_str) if use_boxed else solution_str
    return float(is_equiv(answer, as_answer(ground_truth)))


def score_details(
    solution_str: str, ground_truth: JsonValue, use_boxed: bool = True, format_score: float = 0.1
) -> dict[str, float]:
    """Returns the score and its parts, accuracy and format."""
    accuracy = acc_reward(solution_str, ground_truth, use_boxed)
    format_accuracy = format_reward(solution_str)
    score = (1.0 - format_score) * accuracy + format_score * format_accuracy
    return {"score": score, "acc": accuracy, "format": format_accuracy}


def compute_score(
    solution_str: str, ground_truth: JsonValue, use_boxed: bool = True, format_score: float = 0.1
) -> float:
    """Returns `(1 - format_score) · accuracy + format_score · format`."""
    return score_details(solution_str, ground_truth, use_boxed, format_score)["score"]
