from __future__ import annotations

from typing import Any

import pytest

from hone.rewards.scores import arithmetic


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("<answer> 12 </answer>", 12, 1.0),
        ("<answer>1,234,567</answer>\n", 1234567, 1.0),
        ("<answer>-7</answer>", "-7", 1.0),
        ("<answer>11</answer> <answer>12</answer>", 12, 1.0),
        ("<answer>12</answer> <answer>11</answer>", 12, 0.1),
        ("<answer>3*4</answer>", 12, 0.0),
        ("<answer>12.0</answer>", 12, 0.0),
        ("<answer>1_2</answer>", 12, 0.0),
        ("<answer>1,2</answer>", 12, 0.0),
        ("<answer>" + "9" * 5000 + "</answer>", 12, 0.0),
        ("12", 12, 0.0),
    ],
)
def test_the_last_answer_must_be_one_integer(text: str, truth: Any, score: float) -> None:
    assert arithmetic.compute_score(text, truth) == score


def test_compat_reads_only_text_after_the_assistant_marker() -> None:
    text = "<answer>12</answer>"
    assert arithmetic.compute_score("Assistant: " + text, 12, compat=True) == 1.0
    assert arithmetic.compute_score("Assistant: " + text, 13, compat=True) == 0.1
    assert arithmetic.compute_score("<|im_start|>assistant" + text, 12, compat=True) == 0.0
    assert arithmetic.compute_score(text, 12, compat=True) == 0.0
