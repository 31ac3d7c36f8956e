r"""Numina problems: the answer is looked for in a box or after words, and graded as mathematics.

More lenient than MATH: `\boxed` is not required, and decimals are compared to four figures. Gives
`(correct, well formed, extracted answer)`; the first item is the score.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from hone.rewards.scores.latex import as_number, boxed_answer, strip_string
from hone.rewards.scores.math_reward import is_equiv

RELATIVE_TOLERANCE = Fraction(1, 10_000)
TAIL_CHARS = 2000

_AFTER = re.compile(r"answers?\s*(?::|(?:is|are)\b:?)", re.IGNORECASE)
_CONNECTIVES = re.compile(r"^.*(?:\b(?:be|is|are|get|gives?)\b|=|:\s)", re.DOTALL)


def extract_answer(text: str) -> tuple[str, bool]:
    """The answer's text, and whether it was marked (boxed, or announced by words)."""
    boxed = boxed_answer(text)
    if boxed is not None:
        return boxed.strip(), True
    tail = text[-TAIL_CHARS:]
    marks = list(_AFTER.finditer(tail))
    sentence = tail[marks[-1].end() :] if marks else tail.strip().split("\n")[-1]
    sentence = sentence.strip().split("\n")[0]
    sentence = re.split(r"\.\s", sentence)[0].strip().rstrip(".")
    if not marks:
        sentence = _CONNECTIVES.sub("", sentence)
    return sentence.strip(" $*"), bool(marks)


def grade_answer(given: str, truth: str) -> bool:
    """Equal as text, number or mathematics; decimals and percentages to four figures."""
    if is_equiv(given, truth, symbolic=False):
        return True
    left, right = as_number(strip_string(given)), as_number(strip_string(truth))
    if left is None or right is None:
        return is_equiv(given, truth)
    if "." not in given + truth and "%" not in given + truth:
        return False
    candidates = [right, right / 100, right * 100] if "%" in given + truth else [right]
    return any(abs(left - value) <= RELATIVE_TOLERANCE * abs(value) for value in candidates)


def compute_score(solution_str: str, ground_truth: Any) -> tuple[bool, bool, str]:
    """`(correct, well formed, extracted answer)`."""
    answer, marked = extract_answer(solution_str)
    return bool(answer) and grade_answer(answer, str(ground_truth)), marked, answer
