"""What tools and users say, as tokens that follow the model's own: text is rendered, ids are appended.

The chat template is asked only for what stands after an assistant turn, so nothing the model wrote is
tokenised again and no glue between turns is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from hone.data.chat_template import BrokenTemplate, apply_template
from hone.data.prompts import Message, PromptError
from hone.text import clean_text, clean_values, described
from hone.tokenizer import Tokenizer
from hone.types import Settings

_SPOKEN = "QZ7assistantturnQZ7"
"""Stands for the model's turn while a template renders what follows it."""
_CUT = "(truncated)"


def observation_ids(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    last_token: int,
    template_kwargs: Settings,
    chat: bool,
) -> list[int]:
    """Token ids of new messages after the model's turn, up to where it speaks next.

    `last_token` is the turn's last id: an end token the model wrote itself is not written twice.
    """
    messages = [_without_mark(clean_values(message)) for message in messages]
    if chat and getattr(tokenizer, "chat_template", None):
        text = _rendered(messages, tokenizer, template_kwargs)
        ended = tokenizer.decode([last_token], skip_special_tokens=False)
        text = text.removeprefix(ended) if ended else text
    else:
        text = "".join(_plain(message) for message in messages)
    return [int(token) for token in tokenizer.encode(clean_text(text), add_special_tokens=False)]


def _rendered(messages: Sequence[Message], tokenizer: Tokenizer, kwargs: Settings) -> str:
    talk = [
        {"role": "user", "content": "."},
        {"role": "assistant", "content": _SPOKEN},
        *messages,
    ]
    options = {**kwargs, "add_generation_prompt": True}
    try:
        text = str(apply_template(talk, tokenizer, tokenize=False, **options))
    except BrokenTemplate:
        raise
    except Exception as error:  # a template is foreign code
        roles = ", ".join(sorted({str(m["role"]) for m in messages}))
        raise PromptError(
            f"the tokenizer's chat template cannot render a turn of {roles}: {described(error)}; use "
            "a template that knows these roles (actor_rollout_ref.model.custom_chat_template)"
        ) from error
    _, found, after = text.rpartition(_SPOKEN)
    if not found:
        raise PromptError(
            "the tokenizer's chat template leaves out the assistant's turn, so turns cannot follow it"
        )
    return after


def _without_mark(message: Message) -> Message:
    """The message without the stand-in of the model's turn: what follows it would count as all."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    while _SPOKEN in content:
        content = content.replace(_SPOKEN, "")
    return {**message, "content": content}


def _plain(message: Message) -> str:
    """Without a template: tool answers in the tags of Hermes, a user's words on lines of their own."""
    if message["role"] == "tool":
        return f"\n<tool_response>\n{message['content']}\n</tool_response>\n"
    return f"\n{message['content']}\n"


def cut_text(text: str, longest_chars: int, side: str) -> str:
    """At most `longest_chars` of the text: `left` drops its start, `right` its end, `middle` neither."""
    if len(text) <= longest_chars:
        return text
    if side == "right":
        return f"{text[:longest_chars]}...{_CUT}"
    if side == "left":
        return f"{_CUT}...{text[-longest_chars:]}"
    head = longest_chars // 2
    return f"{text[:head]}...{_CUT}...{text[len(text) - (longest_chars - head) :]}"


def cut_tokens(text: str, tokenizer: Tokenizer, longest_tokens: int | None, side: str) -> str:
    """At most `longest_tokens` of the text; the tags around it are added later and stay whole."""
    if longest_tokens is None:
        return text
    ids = tokenizer.encode(clean_text(text), add_special_tokens=False)
    if len(ids) <= longest_tokens:
        return text
    if side == "right":
        kept = ids[:longest_tokens]
    elif side == "left":
        kept = ids[-longest_tokens:]
    else:
        head = longest_tokens // 2
        kept = [*ids[:head], *ids[len(ids) - (longest_tokens - head) :]]
    return tokenizer.decode(kept, skip_special_tokens=True)
