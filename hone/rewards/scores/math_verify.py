"""Compares mathematics anywhere in the text, boxed or not, with the ground truth symbolically."""

from __future__ import annotations

from hone.rewards.scorer import counted_mishaps
from hone.rewards.scores.prime_math import compute_score as compare_answer


def compute_score(model_output: str, ground_truth: str, timeout_score: float = 0.0) -> float:
    """Returns 1.0 if the answer equals the ground truth, `timeout_score` on a timeout, else 0.0."""
    with counted_mishaps() as mishaps:
        correct, _, _ = compare_answer(model_output, ground_truth)
    return timeout_score if mishaps and not correct else float(correct)
