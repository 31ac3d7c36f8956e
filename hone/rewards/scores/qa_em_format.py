"""Search-R1's score with format rewards for a well-formed trajectory and a useful retrieval.

A well-formed trajectory has the blocks think, any number of times (search, information, think), and
answer. Information blocks are observations, not text of the policy.
"""

from __future__ import annotations

import re

from hone.rewards.scorer import POLICY, Segments, all_answers
from hone.rewards.scores.qa_em import em_check, extract_solution, reference_answers, subem_check
from hone.types import JsonValue, Settings

_TAGS = ("think", "search", "information", "answer")
_TAG = re.compile(r"<(/?)(think|search|information|answer)>")
_OPEN, _CLOSE = "<information>", "</information>"
_ASSISTANT_MARKER = "<|im_start|>assistant"
_TRAILING_SPECIAL_TOKEN = re.compile(r"<\|[^|<>]{1,40}\|>$")
_MAX_TOKEN_CHARS = 44  # 40 characters between `<|` and `|>`
_NEXT_BLOCKS = {
    "start": ("think",),
    "think": ("search", "answer"),
    "search": ("information",),
    "information": ("think",),
    "answer": (),
}


def is_valid_sequence(text: str, *, compat: bool = False) -> tuple[bool, str]:
    """Returns whether a transcript is well formed, and why not; `compat` requires an assistant marker."""
    if _ASSISTANT_MARKER in text:
        text = text.split(_ASSISTANT_MARKER, 1)[1]
    elif compat:
        return False, "missing assistant marker"
    return _check_blocks(text if compat else _strip_special_tokens(text))


def is_valid_conversation(segments: Segments) -> tuple[bool, str]:
    """Returns whether the segments of a response are well formed, and why not."""
    texts = []
    for segment in segments:
        text = segment["text"]
        if segment["role"] == POLICY:
            if _OPEN in text or _CLOSE in text:
                return False, "<information> written by the policy"
            texts.append(text)
        elif _passage(text) is not None:
            texts.append(_OPEN + _CLOSE)  # a passage may contain tags
        elif text.strip():
            return False, "an observation without <information>"
    return _check_blocks(_strip_special_tokens("".join(texts)))


def _strip_special_tokens(text: str) -> str:
    """Removes special tokens and white space at the end, in linear time."""
    end = len(text)
    while True:
        while end and text[end - 1].isspace():
            end -= 1
        token = _TRAILING_SPECIAL_TOKEN.search(text, max(0, end - _MAX_TOKEN_CHARS), end)
        if token is None:
            return text[:end]
        end = token.start()


def _check_blocks(text: str) -> tuple[bool, str]:
    """Returns whether the text consists of blocks in a valid order, and why not."""
    for tag in _TAGS:
        if text.count(f"<{tag}>") != text.count(f"</{tag}>"):
            return False, f"unbalanced <{tag}>"
    last_block, open_block, position = "start", None, 0
    for match in _TAG.finditer(text):
        is_closing, tag = bool(match.group(1)), match.group(2)
        if open_block is None:
            if text[position : match.start()].strip():
                return False, "text between blocks"
            if is_closing or tag not in _NEXT_BLOCKS[last_block]:
                return False, f"{match.group()} after {last_block}"
            open_block = tag
        elif is_closing and tag == open_block:
            last_block, open_block = tag, None
        else:
            return False, f"{match.group()} inside <{open_block}>"
        position = match.end()
    if text[position:].strip():
        return False, "text after the last block"
    return (True, "") if last_block == "answer" else (False, f"ends after {last_block}")


def _passage(observation: str) -> str | None:
    """Returns the text from the first opening to the last closing tag, or None without tags."""
    start, end = observation.find(_OPEN), observation.rfind(_CLOSE)
    return observation[start + len(_OPEN) : end].strip() if 0 <= start < end else None


def score_details(
    solution_str: str,
    ground_truth: JsonValue,
    structure_format_score: float = 0.0,
    final_format_score: float = 0.0,
    retrieval_score: float = 0.0,
    score: float = 1.0,
    extra_info: Settings | None = None,
    score_observations: bool = False,
) -> dict[str, float]:
    """Returns the score and its parts.

    The passages are the observations in `extra_info["transcript_segments"]`; with `score_observations`,
    they are the information blocks in the text, as in Search-R1.
    """
    references = reference_answers(ground_truth)
    if score_observations:
        is_well_formed, _ = is_valid_sequence(solution_str)
        passages = all_answers(solution_str, "information")
    else:
        default_segments = [{"role": POLICY, "text": solution_str}]
        segments = (extra_info or {}).get("transcript_segments") or default_segments
        is_well_formed, _ = is_valid_conversation(segments)
        observations = (segment["text"] for segment in segments if segment["role"] != POLICY)
        passages = [passage for passage in map(_passage, observations) if passage is not None]
    answer = extract_solution(solution_str)
    is_correct = answer is not None and em_check(answer, references)
    has_hit = is_well_formed and any(subem_check(passage, references) for passage in passages)
    if is_correct:
        value = score if is_well_formed else score - structure_format_score
    elif is_well_formed:
        value = structure_format_score + (retrieval_score if has_hit else 0.0)
    else:
        value = final_format_score if answer is not None else 0.0
    return {
        "score": value,
        "acc": float(is_correct),
        "format_valid": float(is_well_formed),
        "retrieval_hit": float(has_hit),
    }


def compute_score(
    solution_str: str,
    ground_truth: JsonValue,
    method: str = "strict",
    structure_format_score: float = 0.0,
    final_format_score: float = 0.0,
    retrieval_score: float = 0.0,
    format_score: float = 0.0,
    score: float = 1.0,
    extra_info: Settings | None = None,
    score_observations: bool = False,
) -> float:
    """Returns only the score. `method` and `format_score` are unused, as in Search-R1."""
    format_scores = (structure_format_score, final_format_score, retrieval_score)
    return score_details(
        solution_str, ground_truth, *format_scores, score, extra_info, score_observations
    )["score"]


compute_score_em = compute_score
