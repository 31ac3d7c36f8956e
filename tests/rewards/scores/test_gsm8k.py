from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hone.rewards.scores import gsm8k


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("Let's think.\n1 + 1 = 2\n#### 2", "2", 1.0),
        ("The answer is 2.", "2", 0.0),
        ("#### 1,234", "1234", 1.0),
        ("#### 1,234", "1,234", 1.0),
        ("#### 3 no, #### 4", "4", 1.0),
        ("#### 4 no, #### 3", "4", 0.0),
        ("#### -5", "-5", 1.0),
        ("####42", "42", 0.0),
        ("#### 42.", "42", 0.0),
        ("#### $42", "42", 0.0),
        ("#### 42", 42, 1.0),
        ("", "0", 0.0),
    ],
)
def test_strict_compares_the_number_after_the_last_hashes(
    text: str, truth: Any, score: float
) -> None:
    assert gsm8k.compute_score(text, truth) == score


def test_only_the_last_300_characters_are_read() -> None:
    assert gsm8k.compute_score("#### 7" + " " * 294, "7") == 1.0
    assert gsm8k.compute_score("#### 7" + " " * 300, "7") == 0.0


def test_a_wrong_well_formed_answer_scores_format_score() -> None:
    assert gsm8k.compute_score("#### 3", "4", format_score=0.1) == 0.1
    assert gsm8k.compute_score("3", "4", format_score=0.1) == 0.0
    assert gsm8k.compute_score("#### 4", "4", format_score=0.1, score=2.0) == 2.0


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("so it is 42.", "42", 1.0),
        ("costs $1,500.00 in all", "1500", 1.0),
        ("6 then -7", "-7", 1.0),
        ("6 then -7", "6", 0.0),
        ("no number", "1", 0.0),
        ("...", "1", 0.0),
        ("1.2.3", "1", 0.0),
    ],
)
def test_flexible_takes_the_last_number(text: str, truth: str, score: float) -> None:
    assert gsm8k.compute_score(text, truth, method="flexible") == score


def test_an_unknown_method_is_an_error_that_names_both() -> None:
    with pytest.raises(ValueError, match=r"'lax'.*strict.*flexible"):
        gsm8k.extract_solution("#### 1", method="lax")


def test_every_reference_solution_of_the_real_set_scores_one(
    shared_rows: Callable[[str], list[dict[str, Any]]],
) -> None:
    rows = shared_rows("gsm8k/test.jsonl")
    assert len(rows) == 1319
    for row in rows:
        truth = row["answer"].split("####")[1].strip().replace(",", "")
        assert gsm8k.compute_score(row["answer"], truth) == 1.0
        assert gsm8k.compute_score(row["answer"], truth, method="flexible") == 1.0
        assert gsm8k.compute_score(row["answer"], truth + "1") == 0.0
