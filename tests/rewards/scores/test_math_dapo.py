from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hone.rewards.scores import math_dapo


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        ("Answer: 34", "34", True),
        ("Answer: A", "A", True),  # a choice, not an article
        ("Answer: A.", "A", True),
        ("Answer: B", "A", False),
        ("Answer: ()", "(A)", False),
        ("Answer: 1", "a+1", False),
        ("Answer: the integer 34", "34", True),
        ("answer : $34$", "34", True),
        (r"Answer: \boxed{34}", "34", True),
        (r"Answer: $\boxed{34}$", 34, True),
        ("**Answer:** 34", "34", True),
        ("Answer: 1\nAnswer: 34", "34", True),
        ("Answer: 34\nAnswer: 1", "34", False),
        ("Answer: x = 34", "34", True),
        ("Answer: 34 degrees", "34", True),
        ("Answer: 1,234", "1234", True),
        ("Answer: 070", "70", True),
        ("Answer: 35", "34", False),
        ("34", "34", False),
        (r"\boxed{34}", "34", True),
        (r"\boxed{1} so \boxed{34}.", "34", True),
        (r"\boxed{34} so \boxed{1}.", "34", False),
        ("Answer: 1\n\\boxed{34}", "34", False),
        (r"\boxed{34}" + " " * 250, "34", True),
        (r"\boxed{34}" + " " * 300, "34", False),
        ("nothing", "[INVALID]", False),
        ("Answer: 43 or $34$", "34", False),
        ("Answer: $34$ or $43$", "34", False),
        ("Answer: 34" + " " * 400, "34", False),
        ("Answer:", "", False),
    ],
)
def test_the_last_answer_is_compared(text: str, truth: Any, right: bool) -> None:
    result = math_dapo.compute_score(text, truth)
    assert result["score"] == (1.0 if right else -1.0)
    assert result["acc"] is right


def test_the_answer_is_returned_as_pred() -> None:
    assert math_dapo.compute_score("Answer: $1{,}000$ ways", "7")["pred"] == "1000"
    assert math_dapo.compute_score("nothing", "7")["pred"] == "[INVALID]"


def test_the_strict_box_reads_the_end_of_the_response() -> None:
    assert math_dapo.compute_score(r"\boxed{7}", "7", strict_box_verify=True)["acc"] is True
    early_box = r"\boxed{7}" + " " * 100
    assert math_dapo.compute_score(early_box, "7", strict_box_verify=True)["acc"] is False


def test_every_reference_answer_of_the_real_sets_is_right(
    shared_rows: Callable[[str], list[dict[str, Any]]],
) -> None:
    names = ["dapo_math/train.jsonl.gz", "math_eval/aime24.jsonl", "math_eval/aime25.jsonl"]
    for row in [row for name in names for row in shared_rows(name)]:
        assert math_dapo.compute_score(f"Answer: {row['answer']}", row["answer"])["acc"] is True
        assert math_dapo.compute_score(f"Answer: 9{row['answer']}", row["answer"])["acc"] is False
