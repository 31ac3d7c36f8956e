"""Compares the answer of a response, in a box or in a sentence, symbolically with the ground truth."""

from __future__ import annotations

from hone.rewards.scorer import counted_mishaps
from hone.rewards.scores.prime_math import compute_score as compare_answer


def compute_score(model_output: str, ground_truth: str, timeout_score: float = 0.0) -> float:
    """Returns 1.0 if the answer equals the ground truth, `timeout_score` on a timeout, else 0.0."""
    with counted_mishaps() as mishaps:
        is_correct, _, _ = compare_answer(model_output, ground_truth)
    return timeout_score if mishaps and not is_correct else float(is_correct)
