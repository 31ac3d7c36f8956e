"""Mathematics anywhere in the text, boxed or not, compared with the reference as mathematics."""

from __future__ import annotations

from hone.rewards.failures import counted_mishaps
from hone.rewards.scores.prime_math import compute_score as compare


def compute_score(model_output: str, ground_truth: str, timeout_score: float = 0.0) -> float:
    """1.0 if the answer equals the reference, `timeout_score` where that takes too long, else 0.0."""
    with counted_mishaps() as mishaps:
        correct, _, _ = compare(model_output, ground_truth)
    return timeout_score if mishaps and not correct else float(correct)
