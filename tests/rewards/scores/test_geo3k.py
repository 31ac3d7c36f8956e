from __future__ import annotations

import pytest

from hone.rewards.scores import geo3k

RESPONSE = "<think>a\nb</think> so \\boxed{80} deg"


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        (RESPONSE, "80", 1.0),
        (RESPONSE, "81", 0.1),
        (r"\boxed{80}", "80", 0.9),
        (" " + RESPONSE, "80", 0.9),
        (r"<think>\boxed{80}</think>", "80", 0.9),
        ("80", "80", 0.0),
    ],
)
def test_the_answer_scores_nine_tenths_and_the_format_one(
    text: str, truth: str, score: float
) -> None:
    assert geo3k.compute_score(text, truth) == pytest.approx(score)


def test_accuracy_and_format_are_returned_separately() -> None:
    assert geo3k.score_details(r"\boxed{80}", "80")["acc"] == 1.0
    assert geo3k.score_details(RESPONSE, "81") == {"score": 0.1, "acc": 0.0, "format": 1.0}


def test_without_use_boxed_the_whole_text_is_the_answer() -> None:
    assert geo3k.acc_reward("80", "80", use_boxed=False) == 1.0
