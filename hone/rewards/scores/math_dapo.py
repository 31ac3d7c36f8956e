r"""DAPO and AIME: scores the text after the last `Answer:`, or else the last `\boxed{}`, as +1 or -1."""

from __future__ import annotations

import re

from hone.data.values import INVALID_PREDICTION
from hone.rewards.ground_truth import as_answer
from hone.rewards.scores.latex import as_number, boxed_answer, strip_string
from hone.types import JsonObject, JsonValue

TAIL_CHARS = 300  # only the end of a response is searched, as in verl
BOX_TAIL_CHARS = 100  # the same for `strict_box_verify`

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_OTHER_ANSWER = re.compile(r"\d|\bor\b", re.IGNORECASE)
_UNIT_WORDS = re.compile(
    r"(?<![A-Za-z\\])(?:square|cubic|units?|ways?|integers?|dollars?|cents?|mph|inch(?:es)?|feet|ft"
    r"|hours?|minutes?|seconds?|days?|km|cm|mm|gm|kg|meters?|points?|digits?|degrees?|pounds?"
    r"|edges?|students?|people)(?![A-Za-z])",
    re.IGNORECASE,
)
# `A` may be an answer, so only lower-case `a` is an article.
_ARTICLE = re.compile(r"(?<![A-Za-z\\])(?:an?|the|The)\s+(?=[A-Za-z0-9$\\])")


def normalize_final_answer(final_answer: str) -> str:
    """Returns an answer without markup, units and separators, and only the right side of `x = 5`."""
    text = final_answer.split("=")[-1]
    boxed = boxed_answer(text)
    if boxed is not None:
        text = boxed
    elif text.count("$") >= 2:
        start, end = text.index("$"), text.rindex("$")
        # not `43 or $42$`, and not `$42$ or forty-three`
        if not _OTHER_ANSWER.search(text[:start] + " " + text[end + 1 :]):
            text = text[start + 1 : end]
    text = _UNIT_WORDS.sub(" ", _ARTICLE.sub(" ", text.replace("**", " ")))
    return strip_string(text)


def verify(solution_str: str, answer: str, strict_box_verify: bool = False) -> tuple[bool, str]:
    """Returns whether the answer in the response equals `answer`, and the answer in the response."""
    if strict_box_verify:
        boxed = boxed_answer(solution_str[-BOX_TAIL_CHARS:])
        pred = INVALID_PREDICTION if boxed is None else boxed
        return boxed is not None and _is_equal(pred.strip(), answer.strip()), pred
    tail = solution_str[-TAIL_CHARS:]
    matches = _ANSWER.findall(tail)
    answer_text = matches[-1] if matches else boxed_answer(tail)
    if answer_text is None:
        return False, INVALID_PREDICTION
    pred = normalize_final_answer(answer_text)
    return _is_equal(pred, normalize_final_answer(answer)), pred


def compute_score(
    solution_str: str, ground_truth: JsonValue, strict_box_verify: bool = False
) -> JsonObject:
    """Returns `{"score": ±1.0, "acc": bool, "pred": text}`."""
    is_correct, pred = verify(solution_str, as_answer(ground_truth), strict_box_verify)
    return {"score": 1.0 if is_correct else -1.0, "acc": is_correct, "pred": pred}


def _is_equal(left: str, right: str) -> bool:
    if not left:
        return False
    if left == right:
        return True
    value = as_number(left)
    return value is not None and value == as_number(right)
