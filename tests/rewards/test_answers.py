"""The answer between tags, beside verl's regular expression."""

from __future__ import annotations

import re

import pytest

from hone.rewards.answers import all_answers, last_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 7 </answer>", "7"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>7</answer> </answer>", "7"),  # a closing tag that nothing opened
        ("</answer> <answer>7</answer></answer></answer>", "7"),
        ("<answer>1</answer> <answer>2", "1"),
        ("<answer></answer>", ""),
        ("<answer>7", None),
        ("7</answer>", None),
        ("</answer><answer>", None),
        ("", None),
    ],
)
def test_the_last_answer_is_that_of_the_last_pair_of_tags(text: str, answer: str | None) -> None:
    assert last_answer(text) == answer
    matches = re.findall("<answer>(.*?)</answer>", text, re.DOTALL)
    assert (matches[-1].strip() if matches else None) == answer
    assert all_answers(text) == [match.strip() for match in matches]
