r"""Numina problems: finds the answer in a box or after key words, and compares it symbolically.

The rule is more lenient than MATH's: `\boxed` is not required, and answers may be rounded.
"""

from __future__ import annotations

import re
from fractions import Fraction

from hone.rewards.ground_truth import as_answer
from hone.rewards.scores.latex import as_number, boxed_answer, num_decimals, strip_string
from hone.rewards.scores.math_reward import is_equiv
from hone.types import JsonValue

RELATIVE_TOLERANCE = Fraction(1, 10_000)
TAIL_CHARS = 2000  # only the end of a text without a box is searched

_ANSWER_PHRASE = re.compile(r"answers?\s*(?::|(?:is|are)\b:?)", re.IGNORECASE)
_ENVIRONMENT = re.compile(r"\\end\{([a-zA-Z]{1,20}\*?)\}[\s$.\\\])]*$")
_CONNECTIVES = re.compile(r"^.*(?:\b(?:be|is|are|get|gives?)\b|=|:\s)", re.DOTALL)


def extract_answer(text: str) -> tuple[str, bool]:
    """Returns the text of the answer, and whether a box or key words mark the answer."""
    boxed = boxed_answer(text)
    if boxed is not None:
        return boxed.strip(), True
    tail = text[-TAIL_CHARS:]
    match = _ENVIRONMENT.search(tail)  # such as a matrix at the end of the text
    start = tail.rfind(f"\\begin{{{match.group(1)}}}") if match else -1
    if match and start >= 0:
        return tail[start : match.end(1) + 1], bool(_ANSWER_PHRASE.search(tail))
    phrases = list(_ANSWER_PHRASE.finditer(tail))
    sentence = tail[phrases[-1].end() :] if phrases else tail.strip().split("\n")[-1]
    sentence = sentence.strip().split("\n")[0]
    sentence = re.split(r"\.\s", sentence)[0].strip().rstrip(".")
    if not phrases:
        sentence = _CONNECTIVES.sub("", sentence)
    return sentence.strip(" $*"), bool(phrases)


def grade_answer(answer: str, truth: str) -> bool:
    """Returns whether the answers are equal as text, numbers or expressions, also after rounding.

    A rounded number must agree in all its decimals, and in at least four digits. An integer
    never counts as rounded.
    """
    if is_equiv(answer, truth, symbolic=False):
        return True
    forms = strip_string(answer), strip_string(truth)
    left, right = map(as_number, forms)
    if left is None or right is None:
        return is_equiv(answer, truth)
    decimals = [count for count in map(num_decimals, forms) if count is not None]
    if not decimals or left.denominator == 1 or right.denominator == 1:
        return False
    half_unit = Fraction(1, 2 * 10 ** min(decimals))
    return abs(left - right) <= min(half_unit, RELATIVE_TOLERANCE * abs(right))


def compute_score(solution_str: str, ground_truth: JsonValue) -> tuple[bool, bool, str]:
    """Returns whether the answer is right, whether the answer is marked, and the answer."""
    answer, is_marked = extract_answer(solution_str)
    return bool(answer) and grade_answer(answer, as_answer(ground_truth)), is_marked, answer
