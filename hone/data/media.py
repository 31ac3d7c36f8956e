"""Prompts with images and videos: the placeholders in a text become typed parts, as in verl."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from hone.data.messages import Message, PromptError
from hone.text import short_repr
from hone.types import Row


def with_typed_parts(
    messages: Sequence[Message], row: Row, image_key: str, video_key: str
) -> list[Message]:
    """Replaces each `<image>` and `<video>` by a typed part.

    Raises PromptError if the row has images or videos, but not one per placeholder.
    """
    media_counts: Counter[str] = Counter()
    typed_messages: list[Message] = []
    for message in messages:
        parts = message["content"]
        if isinstance(parts, str):
            pieces = re.split("(<image>|<video>)", parts)
            parts = [_as_part(piece) for piece in pieces if piece]
        kinds = [part["type"] for part in parts if part.get("type") in ("image", "video")]
        media_counts.update(kinds)
        typed_messages.append({**message, "content": parts} if kinds else dict(message))
    for kind, key in (("image", image_key), ("video", video_key)):
        column = row.get(key)
        if column is not None and hasattr(column, "tolist"):  # a numpy array
            column = column.tolist()
        if column is not None and not isinstance(column, list | tuple):
            raise PromptError(f"column {key!r} must be a list, got {short_repr(column)}")
        if column and media_counts[kind] != len(column):
            raise PromptError(
                f"the prompt has {media_counts[kind]} <{kind}>, column {key!r} has {len(column)}"
            )
    return typed_messages


def _as_part(piece: str) -> Message:
    if piece in ("<image>", "<video>"):
        return {"type": piece.strip("<>")}
    return {"type": "text", "text": piece}
