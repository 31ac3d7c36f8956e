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
        (r"\boxed{50\%}", "50", True),
        (r"\boxed{50\%}", "0.5", False),
        (r"\boxed{3.1416}", "3.14159265", True),
        (r"\boxed{0.3333}", r"\frac{1}{3}", True),
        (r"\boxed{0.3334}", r"\frac{1}{3}", False),
        (r"\boxed{50}", "0.5", False),
        ("", "3", False),
    ],
)
def test_the_answer_is_read_from_a_box_or_after_key_words(
    text: str, truth: str, right: bool
) -> None:
    assert prime_math.compute_score(text, truth)[0] is right


def test_the_format_and_the_extracted_answer_are_returned() -> None:
    assert prime_math.compute_score(r"\boxed{8}", "8") == (True, True, "8")
    assert prime_math.compute_score("it is 8", "8") == (True, False, "8")


MATRIX = "\\begin{bmatrix}\n -7 & 6 \\\\\n 11 & -9 \n\\end{bmatrix}"


@pytest.mark.parametrize(
    "text", [MATRIX, f"so\n$$A = {MATRIX}$$", f"The answer is\n\\[{MATRIX}\\].\n"]
)
def test_a_matrix_over_several_lines_needs_no_box(text: str) -> None:
    assert prime_math.compute_score(text, MATRIX)[0] is True
    assert prime_math.compute_score(text, MATRIX.replace("\n", ""))[0] is True
    assert prime_math.compute_score(text, MATRIX.replace("11", "12"))[0] is False
    assert prime_math.compute_score(text + "\nwhich is 5", MATRIX)[0] is False
