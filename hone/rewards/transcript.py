"""Segments of a response by author: the policy, or tools, searches and users (observations).

`extra_info["transcript_segments"]` is a list of `{"role": "policy" | "observation", "text": …}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hone.types import JsonObject, Settings

POLICY, OBSERVATION = "policy", "observation"

Segments = Sequence[Mapping[str, str]]


def policy_text(segments: Segments) -> str:
    """Returns the policy's text, with a line break in place of each observation."""
    texts = [segment["text"] for segment in segments if segment["role"] == POLICY]
    return texts[0] if len(texts) == 1 else "\n".join(text for text in texts if text)


def policy_transcript_info(text: str) -> JsonObject:
    """Returns the `extra_info` of a response without observations."""
    return {"transcript": text, "transcript_segments": [{"role": POLICY, "text": text}]}


def segments_of(solution_str: str, extra_info: Settings | None) -> Segments:
    """Returns the segments of a row; a row without them has one, the policy's whole text."""
    segments = (extra_info or {}).get("transcript_segments")
    return segments if segments else [{"role": POLICY, "text": solution_str}]
