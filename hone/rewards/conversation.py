"""Renders a prompt and a response as text for a reward model or a judge, and escapes control tokens."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from hone.data.chat_template import apply_template
from hone.data.messages import content_text
from hone.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[Mapping[str, Any]]  # plain text, or chat messages
_ZERO_WIDTH_SPACE = "\u200b"
_CONTROL_TOKENS = (
    *("<|", "<｜", "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>", "<s>", "</s>", "<bos>", "<eos>"),
    *("<start_of_turn>", "<end_of_turn>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[CLS]", "[SEP]"),
)
"""Control tokens of common chat templates, or their beginnings."""


def prompt_text(prompt: Prompt) -> str:
    """Returns a text prompt unchanged; joins the texts of chat messages with blank lines."""
    if isinstance(prompt, str):
        return prompt
    contents = (message.get("content") for message in prompt if isinstance(message, Mapping))
    return "\n\n".join(filter(None, map(content_text, contents)))


def has_template(tokenizer: Tokenizer | None) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def conversation_text(prompt: Prompt, response: str, tokenizer: Tokenizer) -> str:
    """Renders chat messages and the response with the chat template.

    Without a template, blank lines join the messages and the response. A text prompt and the
    response are concatenated.
    """
    if isinstance(prompt, str):
        return prompt + response
    if not has_template(tokenizer):
        return f"{prompt_text(prompt)}\n\n{response}"
    messages = [*prompt, {"role": "assistant", "content": response}]
    return str(apply_template(messages, tokenizer, tokenize=False))


def escape_special_tokens(text: str, tokenizer: Tokenizer | None = None) -> str:
    """Inserts a zero-width space into each control token, so that tokenizers read the token as plain text."""
    special_tokens = () if tokenizer is None else getattr(tokenizer, "all_special_tokens", ())
    pattern = _control_token_pattern(tuple(special_tokens))
    return pattern.sub(lambda match: match[0][0] + _ZERO_WIDTH_SPACE + match[0][1:], text)


@functools.lru_cache(maxsize=16)
def _control_token_pattern(special_tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Returns a pattern that matches the longest control token first."""
    tokens = {token for token in (*_CONTROL_TOKENS, *special_tokens) if len(token) > 1}
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
