"""Search-R1 with credit for form: a right answer, a well-formed trajectory, a useful retrieval.

Well formed is think, then any number of (search, information, think), then answer, and nothing
but white space between. The chat template's markers are not needed and do not matter.
"""

from __future__ import annotations

import re
from typing import Any

from hone.rewards.scores.qa_em import (
    em_check,
    extract_solution,
    golden_answers,
    normalize_answer,
)

_TAGS = ("think", "search", "information", "answer")
_TAG = re.compile(r"<(/?)(think|search|information|answer)>")
_MARKER = "<|im_start|>assistant"
_SPECIAL = re.compile(r"<\|[^|<>]{1,40}\|>$")
_NEXT = {
    "start": ("think",),
    "think": ("search", "answer"),
    "search": ("information",),
    "information": ("think",),
    "answer": (),
}


def is_valid_sequence(text: str, *, compat: bool = False) -> tuple[bool, str]:
    """Whether the trajectory is well formed, and the reason when it is not.

    `compat` asks for the ChatML marker and objects to a trailing end-of-turn token, as upstream.
    """
    if _MARKER in text:
        text = text.split(_MARKER, 1)[1]
    elif compat:
        return False, "missing assistant marker"
    if not compat:
        text = _without_trailing_special(text)
    for tag in _TAGS:
        if text.count(f"<{tag}>") != text.count(f"</{tag}>"):
            return False, f"unbalanced <{tag}>"
    return _follows_order(text)


def _without_trailing_special(text: str) -> str:
    text = text.rstrip()
    while (found := _SPECIAL.search(text, max(0, len(text) - 44))) is not None:
        text = text[: found.start()].rstrip()
    return text


def _follows_order(text: str) -> tuple[bool, str]:
    done, inside, position = "start", None, 0
    for match in _TAG.finditer(text):
        closing, tag = bool(match.group(1)), match.group(2)
        if inside is None:
            if text[position : match.start()].strip():
                return False, "text between blocks"
            if closing or tag not in _NEXT[done]:
                return False, f"{match.group()} after {done}"
            inside = tag
        elif closing and tag == inside:
            done, inside = tag, None
        else:
            return False, f"{match.group()} inside <{inside}>"
        position = match.end()
    if text[position:].strip():
        return False, "text after the last block"
    return (True, "") if done == "answer" else (False, f"ends after {done}")


def extract_information_blocks(text: str) -> list[str]:
    """What the searches returned."""
    found = re.findall(r"<information>(.*?)</information>", text, re.DOTALL)
    return [block.strip() for block in found]


def is_retrieval_correct(text: str, golden: list[str]) -> bool:
    """Whether a reference answer stands in something that was retrieved."""
    wanted = [answer for answer in map(normalize_answer, golden) if answer]
    blocks = [normalize_answer(block) for block in extract_information_blocks(text)]
    return any(answer in block for block in blocks for answer in wanted)


def judge(
    solution_str: str,
    ground_truth: Any,
    structure_format_score: float = 0.0,
    final_format_score: float = 0.0,
    retrieval_score: float = 0.0,
    score: float = 1.0,
) -> dict[str, Any]:
    """The score and what it is made of."""
    golden = golden_answers(ground_truth)
    valid, _ = is_valid_sequence(solution_str)
    answer = extract_solution(solution_str)
    right = answer is not None and em_check(answer, golden)
    retrieved = valid and is_retrieval_correct(solution_str, golden)
    if right:
        value = score if valid else score - structure_format_score
    elif valid:
        value = structure_format_score + (retrieval_score if retrieved else 0.0)
    else:
        value = final_format_score if answer is not None else 0.0
    return {
        "score": value,
        "acc": float(right),
        "format_valid": float(valid),
        "retrieval_hit": float(retrieved),
    }


def compute_score(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    structure_format_score: float = 0.0,
    final_format_score: float = 0.0,
    retrieval_score: float = 0.0,
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """The score alone. `method` and `format_score` are in the family's signature and unused there."""
    value: float = judge(
        solution_str,
        ground_truth,
        structure_format_score,
        final_format_score,
        retrieval_score,
        score,
    )["score"]
    return value


compute_score_em = compute_score
