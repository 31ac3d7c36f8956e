from __future__ import annotations

import pytest

from hone.rewards.scores import prime_math


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        (r"The answer is 7, so \boxed{8}", "8", True),
        (r"The answer is 7, so \boxed{8}", "7", False),
        ("Therefore the answer is 3.", "3", True),
        ("The answers are: 3. Done", "3", True),
        ("Answer: $x=3$", "3", True),
        ("Hence x + y = 12", "12", True),
        (r"\boxed{33.333}", "33.3333", True),
        (r"\boxed{33.3}", "33.3333", False),
        (r"\boxed{10000}", "10001", False),
        (r"\boxed{50\%}", "0.5", True),
        (r"\boxed{50}", "0.5", False),
        ("", "3", False),
    ],
)
def test_the_answer_is_found_in_a_box_or_after_words(text: str, truth: str, right: bool) -> None:
    assert prime_math.compute_score(text, truth)[0] is right


def test_the_form_and_the_extracted_answer_are_told() -> None:
    assert prime_math.compute_score(r"\boxed{8}", "8") == (True, True, "8")
    assert prime_math.compute_score("it is 8", "8") == (True, False, "8")
