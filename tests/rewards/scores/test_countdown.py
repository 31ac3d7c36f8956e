from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hone.rewards.ground_truth import GroundTruthError
from hone.rewards.scores import countdown

TRUTH = {"target": 24, "numbers": [2, 3, 4]}
HEAD = "User: …\nAssistant: Let me solve this.\n<think>"


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("</think>\n<answer> 2*3*4 </answer>", TRUTH, 1.0),
        ("</think>\n<answer> 2*3*4 </answer>\n", TRUTH, 0.0),
        ("</think>\n<answer></answer>", TRUTH, 0.1),
        ("</think>\n<answer>2*3*4 = 24</answer>", TRUTH, 0.1),
        ("</think>\n<answer>4*6</answer>", TRUTH, 0.1),
        ("</think>\n<answer>2</answer> <answer>2*3*4</answer>", TRUTH, 1.0),
        ("</think>\n<answer>2*3*4.0</answer>", TRUTH, 0.1),
        ("</think>\n<answer>(2)(3)(4)</answer>", TRUTH, 0.1),
        ("</think>\n<answer>2/(3-3)</answer>", {"target": 2, "numbers": [2, 3, 3]}, 0.1),
        ("</think>\n<answer>2*3\n*4</answer>", TRUTH, 0.0),
        ("</think>\n<answer>2**3*3</answer>", {"target": 24, "numbers": [2, 3, 3]}, 1.0),
        ("</think>\n<answer>49//2*1</answer>", {"target": 24, "numbers": [49, 2, 1]}, 1.0),
    ],
)
def test_compat_scores_equal_those_of_tinyzero(
    text: str, truth: dict[str, Any], score: float
) -> None:
    assert countdown.compute_score(HEAD + text, truth, compat=True) == score


def test_compat_requires_a_marker_by_default() -> None:
    text = "<answer>2*3*4</answer>"
    assert countdown.compute_score(text, TRUTH, compat=True) == 0.0
    assert countdown.compute_score("<|im_start|>assistant" + text, TRUTH, compat=True) == 1.0
    assert countdown.compute_score(text, TRUTH, compat=True, assistant_marker=False) == 1.0


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("<answer> 2*3*4 </answer>", TRUTH, 1.0),
        ("<answer> 2*3*4 </answer>\n\nDone.", TRUTH, 1.0),
        ("<answer>2*3\n*4</answer>", TRUTH, 1.0),
        ("<answer>2</answer>\nno\n<answer>(4*3)*2</answer>", TRUTH, 1.0),
        ("<answer>2*3*4</answer> <answer>2+3</answer>", TRUTH, 0.1),
        ("<answer>4*6</answer>", TRUTH, 0.1),
        ("<answer>2*3*4*1</answer>", TRUTH, 0.1),
        ("<answer>24</answer>", TRUTH, 0.1),
        ("<answer>2*3*4 = 24</answer>", TRUTH, 0.1),
        ("<answer></answer>", TRUTH, 0.1),
        ("<answer>2*3*4", TRUTH, 0.0),
        ("2*3*4", TRUTH, 0.0),
        ("", TRUTH, 0.0),
        ("<answer>2**3*3</answer>", {"target": 24, "numbers": [2, 3, 3]}, 0.1),
        ("<answer>49//2*1</answer>", {"target": 24, "numbers": [49, 2, 1]}, 0.1),
        ("<answer>8/(3-8/3)</answer>", {"target": 24, "numbers": [8, 3, 8, 3]}, 1.0),
        ("<answer>__import__('os').system('x')</answer>", TRUTH, 0.1),
        ("<answer>" + "(" * 10_000 + "</answer>", TRUTH, 0.1),
    ],
)
def test_the_default_reads_the_last_answer_and_small_arithmetic_only(
    text: str, truth: dict[str, Any], score: float
) -> None:
    assert countdown.compute_score(text, truth) == score


def test_fractions_are_exact() -> None:
    truth = {"target": 1, "numbers": [1, 3, 3]}
    assert countdown.compute_score("<answer>1/3*3</answer>", truth) == 1.0
    near_miss = {"target": 100000, "numbers": [99999, 1, 999999]}
    assert countdown.compute_score("<answer>99999+1-1/999999</answer>", near_miss) == 0.1


def test_numbers_may_be_unused_only_without_require_all() -> None:
    text = "<answer>2*3</answer>"
    truth = {"target": 6, "numbers": [2, 3, 4]}
    assert countdown.compute_score(text, truth) == 0.1
    assert countdown.compute_score(text, truth, require_all=False) == 1.0
    twice = {"target": 4, "numbers": [2, 3]}
    assert countdown.compute_score("<answer>2+2</answer>", twice, require_all=False) == 0.1


def test_the_last_line_only_is_an_option() -> None:
    text = "<answer>2*3*4</answer>\n"
    assert countdown.compute_score(text, TRUTH, last_line_only=True) == 0.0
    assert countdown.compute_score(text.strip(), TRUTH, last_line_only=True) == 1.0


@pytest.mark.parametrize(
    "truth",
    [
        {"target": np.int64(24), "numbers": np.array([2, 3, 4])},
        json.dumps(TRUTH),
        {"target": 24, "numbers": (4, 3, 2)},
    ],
)
def test_the_truth_may_come_from_parquet_or_json(truth: Any) -> None:
    assert countdown.compute_score("<answer>2*3*4</answer>", truth) == 1.0


def test_a_ground_truth_of_another_format_is_an_error() -> None:
    with pytest.raises(GroundTruthError, match=r"target, numbers; got '24'"):
        countdown.compute_score("<answer>1</answer>", "24")


@pytest.mark.parametrize("file", ["countdown/test.jsonl", "countdown/train.jsonl.gz"])
def test_every_solution_of_the_real_set_scores_one(
    shared_rows: Callable[[str], list[dict[str, Any]]], file: str
) -> None:
    for row in shared_rows(file):
        truth = {"target": row["target"], "numbers": row["nums"]}
        answer = f"<think>…</think>\n<answer> {row['solution']} </answer>\n"
        assert countdown.compute_score(answer, truth) == 1.0
        assert countdown.compute_score(answer, truth | {"target": row["target"] + 1}) == 0.1
