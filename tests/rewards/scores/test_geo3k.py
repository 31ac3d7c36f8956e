from __future__ import annotations

import pytest

from hone.rewards.scores import geo3k

THOUGHT = "<think>a\nb</think> so \\boxed{80} deg"


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        (THOUGHT, "80", 1.0),
        (THOUGHT, "81", 0.1),
        (r"\boxed{80}", "80", 0.9),
        (" " + THOUGHT, "80", 0.9),
        (r"<think>\boxed{80}</think>", "80", 0.9),
        ("80", "80", 0.0),
    ],
)
def test_nine_tenths_for_the_answer_and_one_for_the_form(
    text: str, truth: str, score: float
) -> None:
    assert geo3k.compute_score(text, truth) == pytest.approx(score)


def test_accuracy_is_told_apart_from_form() -> None:
    assert geo3k.judge(r"\boxed{80}", "80")["acc"] == 1.0
    assert geo3k.judge(THOUGHT, "81") == {"score": 0.1, "acc": 0.0, "format": 1.0}


def test_without_a_box_the_whole_text_is_the_answer_when_told_so() -> None:
    assert geo3k.acc_reward("80", "80", use_boxed=False) == 1.0
