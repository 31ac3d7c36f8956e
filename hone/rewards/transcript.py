"""A response by author: what the policy wrote, and what tools, searches and users said in between.

`extra_info["transcript_segments"]` holds it as `{"role": "policy" | "observation", "text": …}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hone.types import JsonObject, Settings

POLICY, OBSERVATION = "policy", "observation"

Segments = Sequence[Mapping[str, str]]


def policy_text(segments: Segments) -> str:
    """The policy's words alone. A line break stands for an observation, so no two turns make a word."""
    texts = [segment["text"] for segment in segments if segment["role"] == POLICY]
    return texts[0] if len(texts) == 1 else "\n".join(text for text in texts if text)


def of_policy(text: str) -> JsonObject:
    """The `extra_info` of a response that the policy wrote from end to end."""
    return {"transcript": text, "transcript_segments": [{"role": POLICY, "text": text}]}


def segments_of(solution_str: str, extra_info: Settings | None) -> Segments:
    """The segments that came with a row; a text that came without any is the policy's own."""
    segments = (extra_info or {}).get("transcript_segments")
    return segments if segments else [{"role": POLICY, "text": solution_str}]
