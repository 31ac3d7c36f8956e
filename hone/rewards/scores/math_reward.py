r"""MATH: the last `\boxed{…}` must equal the ground truth as text, as a number, or symbolically."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hone.rewards.ground_truth import as_answer
from hone.rewards.scores.latex import (
    as_number,
    boxed_answer,
    chain_members,
    collection_kind,
    is_unambiguous,
    last_boxed_only_string,
    remove_boxed,
    remove_unit,
    strip_string,
)
from hone.rewards.scores.symbolic import MAX_CHARS, symbolically_equal
from hone.types import JsonValue, Settings

__all__ = [
    "compute_score",
    "compute_score_batched",
    "is_equiv",
    "last_boxed_only_string",
    "remove_boxed",
    "strip_string",
]

_EQUIVALENT_KINDS = {"list": "set"}  # `1,2` without braces may equal `\{1,2\}`
_BASE_SUBSCRIPT = re.compile(r"\d_")
_LETTER = re.compile(r"(?<!\\)\b[a-zA-Z]")
_ALTERNATIVES = re.compile(r"\bor\b|\\(?:lor|vee)(?![a-zA-Z])")
_PERCENT = re.compile(r"\\?%")


def compute_score(solution_str: str, ground_truth: JsonValue, symbolic: bool = True) -> float:
    """Returns 1.0 if the boxed answer is right, else 0.0."""
    answer = boxed_answer(solution_str)
    if answer is None:
        return 0.0
    return float(is_equiv(answer, as_answer(ground_truth), symbolic=symbolic))


def compute_score_batched(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[str],
    extra_infos: Sequence[Settings],
) -> list[float]:
    """Calls `compute_score` for each response, for the batch manager."""
    return [compute_score(*pair) for pair in zip(solution_strs, ground_truths, strict=True)]


def is_equiv(str1: str | None, str2: str | None, *, symbolic: bool = True) -> bool:
    """Returns whether answer `str1` equals reference `str2`; an empty text equals nothing."""
    if str1 is None or str2 is None:
        return False
    answer, truth = strip_string(str1), strip_string(str2)
    if not answer or not truth or answer == truth:
        return bool(answer and truth)
    left, right = as_number(answer), as_number(truth)
    if left is not None and right is not None:
        return left == right
    # math-verify alone is too lenient: it accepts a set for a pair, and `42_8` for 42.
    kinds = [kind for kind in map(collection_kind, (answer, truth)) if kind]
    distinct_kinds = {_EQUIVALENT_KINDS.get(kind, kind) for kind in kinds}
    has_base = _BASE_SUBSCRIPT.search(answer) or _BASE_SUBSCRIPT.search(truth)
    is_too_long = max(len(str1), len(str2)) > MAX_CHARS
    if (
        not symbolic
        or len(distinct_kinds) > 1
        or has_base
        or is_too_long
        or not is_unambiguous(str1)
    ):
        return False
    members, num_truth_members = chain_members(str1), len(chain_members(str2))
    if not kinds and len(members) > 1 == num_truth_members:
        return all(is_equiv(member, str2) for member in members)  # not only the last
    if num_truth_members > 1 and not _LETTER.search(str2):
        return False  # math-verify finds all true equations of numbers equal
    if distinct_kinds & {"tuple", "interval"} and _ALTERNATIVES.search(str1):
        return False
    texts = (_PERCENT.sub("", remove_unit(text.strip())) for text in (str1, str2))
    return symbolically_equal(*texts)
