"""Answers anywhere in the text are compared; a timeout scores `timeout_score`."""

from __future__ import annotations

import pytest

from hone.rewards.scorer import count_mishap
from hone.rewards.scores import math_batch, math_verify
from hone.rewards.scores import math_verify as module


def test_the_answer_is_compared_with_or_without_a_box() -> None:
    assert math_verify.compute_score(model_output="so \\boxed{0.5}", ground_truth="\\frac12") == 1.0
    assert math_verify.compute_score("the answer is 42", "42") == 1.0
    assert math_verify.compute_score("the answer is 41", "42", timeout_score=0.3) == 0.0


def test_a_comparison_that_times_out_scores_timeout_score(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_out(answer: str, truth: str) -> tuple[bool, bool, str]:
        count_mishap("symbolic_timeout")
        return False, True, ""

    monkeypatch.setattr(module, "compare_answer", time_out)
    assert math_verify.compute_score("x", "y", timeout_score=0.3) == 0.3


def test_a_batch_is_scored_by_one_call() -> None:
    texts = ["\\boxed{1}", "\\boxed{2}"]
    assert math_batch.compute_score_batched(["m"] * 2, texts, ["1", "1"], [{}, {}]) == [1.0, 0.0]
