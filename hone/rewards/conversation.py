"""Renders conversations for a reward model or a judge.

A response may spell control tokens of the model that reads it. A zero-width space after their first
character keeps tokenizers from reading them as control tokens.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from hone.data.chat_template import apply_template
from hone.tokenizer import Tokenizer
from hone.types import Settings

Prompt: TypeAlias = str | Sequence[Settings]
"""Plain text, or chat messages."""
_ZERO_WIDTH_SPACE = "\u200b"
_CONTROL_TOKENS = (
    *("<|", "<｜", "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>", "<s>", "</s>", "<bos>", "<eos>"),
    *("<start_of_turn>", "<end_of_turn>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[CLS]", "[SEP]"),
)
"""Control tokens of common chat templates, or their beginnings."""


def prompt_text(prompt: Prompt) -> str:
    """Returns a text prompt, or the joined contents of chat messages."""
    if isinstance(prompt, str):
        return prompt
    contents = (turn.get("content") for turn in prompt if isinstance(turn, Mapping))
    return "\n\n".join(content for content in contents if isinstance(content, str))


def has_template(tokenizer: Tokenizer | None) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def conversation_text(prompt: Prompt, answer: str, tokenizer: Tokenizer) -> str:
    """Returns the conversation by the chat template, or without one joined by blank lines."""
    if isinstance(prompt, str):
        return prompt + answer
    if not has_template(tokenizer):
        return f"{prompt_text(prompt)}\n\n{answer}"
    turns = [*prompt, {"role": "assistant", "content": answer}]
    return str(apply_template(turns, tokenizer, tokenize=False))


def escape_special_tokens(text: str, tokenizer: Tokenizer | None = None) -> str:
    """Returns the text with its control tokens broken up, so that they are plain text."""
    special = () if tokenizer is None else getattr(tokenizer, "all_special_tokens", ())
    return _pattern(tuple(special)).sub(lambda m: m[0][0] + _ZERO_WIDTH_SPACE + m[0][1:], text)


@functools.lru_cache(maxsize=16)
def _pattern(special: tuple[str, ...]) -> re.Pattern[str]:
    names = sorted(
        {name for name in (*_CONTROL_TOKENS, *special) if len(name) > 1}, key=len, reverse=True
    )
    return re.compile("|".join(map(re.escape, names)))
