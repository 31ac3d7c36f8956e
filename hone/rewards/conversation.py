"""The text of a conversation for a reward model or a judge, in which the response stays a response.

Text that a policy wrote can spell a model's control tokens. A zero-width space after their first character
keeps tokenizers from reading them as control tokens.
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
_BREAK = "\u200b"
_CONTROL = (
    *("<|", "<｜", "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>", "<s>", "</s>", "<bos>", "<eos>"),
    *("<start_of_turn>", "<end_of_turn>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[CLS]", "[SEP]"),
)
"""How the control tokens of common chat templates begin."""


def prompt_text(prompt: Prompt) -> str:
    """Returns the prompt's text; of chat messages, their contents."""
    if isinstance(prompt, str):
        return prompt
    contents = (turn.get("content") for turn in prompt if isinstance(turn, Mapping))
    return "\n\n".join(content for content in contents if isinstance(content, str))


def has_template(tokenizer: Tokenizer | None) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def conversation_text(prompt: Prompt, answer: str, tokenizer: Tokenizer) -> str:
    """Renders the conversation with the chat template; a plain prompt stays plain text.

    Without a template the contents are joined by blank lines.
    """
    if isinstance(prompt, str):
        return prompt + answer
    if not has_template(tokenizer):
        return f"{prompt_text(prompt)}\n\n{answer}"
    turns = [*prompt, {"role": "assistant", "content": answer}]
    return str(apply_template(turns, tokenizer, tokenize=False))


def defused(text: str, tokenizer: Tokenizer | None = None) -> str:
    """Returns text in which no control token of the tokenizer or of a common template is spelled."""
    special = () if tokenizer is None else getattr(tokenizer, "all_special_tokens", ())
    return _pattern(tuple(special)).sub(lambda m: m[0][0] + _BREAK + m[0][1:], text)


@functools.lru_cache(maxsize=16)
def _pattern(special: tuple[str, ...]) -> re.Pattern[str]:
    names = sorted({name for name in (*_CONTROL, *special) if len(name) > 1}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)))
