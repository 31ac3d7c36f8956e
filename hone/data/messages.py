"""Messages of a prompt: their types, and the conversion of text, parts and numpy arrays to messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from hone.errors import UserError
from hone.text import short_repr

Message: TypeAlias = dict[str, Any]
"""One chat message: `role`, `content`, and further keys of the template."""
Prompt: TypeAlias = str | Sequence[Message] | None
"""The prompt of a row: text, messages, or the typed parts of one message."""
Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""Tool schemas that a chat template shows to the model."""

ROLES = ("system", "user", "assistant", "tool", "developer", "function", "ipython", "observation")
"""The roles that chat templates know; any other role is an error."""


class PromptError(UserError, ValueError):
    """Raised for a prompt that cannot be rendered."""


class PromptTooLong(PromptError):
    """Raised for a text far above the token limit, after the start of the text is tokenised."""

    reason = "too long"


def as_messages(raw_prompt: Prompt) -> list[Message]:
    """Converts a prompt to messages; a string or a list of typed parts becomes one user message."""
    if isinstance(raw_prompt, str):
        return [{"role": "user", "content": raw_prompt}]
    if raw_prompt is not None and hasattr(raw_prompt, "tolist"):  # a numpy array
        raw_prompt = raw_prompt.tolist()
    if not isinstance(raw_prompt, Sequence) or not raw_prompt:
        raise PromptError(
            f"a prompt must be a string or a non-empty list of messages, got {short_repr(raw_prompt)}"
        )
    entries = [entry for entry in raw_prompt if isinstance(entry, Mapping)]
    if len(entries) < len(raw_prompt):
        raise PromptError(
            f"every message of a prompt must be an object, got {short_repr(raw_prompt)}"
        )
    if all("type" in entry and entry.get("role") is None for entry in entries):
        return [_as_message({"role": "user", "content": entries})]
    return [_as_message(entry) for entry in entries]


def _as_message(entry: Message) -> Message:
    """Returns a copy of a message without null entries; raises PromptError if a field is malformed."""
    message = remove_nulls(entry)
    if not isinstance(message.get("role"), str):
        raise PromptError(
            f"a message needs a 'role' (system, user, assistant…): {short_repr(entry)}"
        )
    content = message.get("content")
    if content is None and "tool_calls" in message:
        message["content"] = ""
    elif not isinstance(content, (str, list)):
        raise PromptError(
            f"a message's 'content' must be text or a list of parts: {short_repr(entry)}"
        )
    elif isinstance(content, list) and not all(map(_is_valid_part, content)):
        raise PromptError(
            "every part of a message's 'content' must be an object with a 'type', and its 'text' "
            f"must be text: {short_repr(entry)}"
        )
    return message


def _is_valid_part(part: Any) -> bool:
    return (
        isinstance(part, Mapping)
        and isinstance(part.get("type", ""), str)
        and isinstance(part.get("text", ""), str)
    )


def content_text(content: Any) -> str:
    """Returns the text of a message's content, which may be a list of parts such as texts and images."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    texts = (part.get("text") for part in parts if isinstance(part, Mapping))
    return "".join(text for text in texts if isinstance(text, str))


def check_message_roles(messages: Sequence[Message]) -> None:
    """Raises PromptError for a role that no chat template knows."""
    for number, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise PromptError(
                f"message {number} has role {short_repr(message['role'])}, which no chat template knows;"
                f" use one of {', '.join(ROLES)}"
            )


def remove_nulls(value: Any) -> Any:
    """Returns a copy without the null entries that parquet adds to objects."""
    if isinstance(value, Mapping):
        return {key: remove_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [remove_nulls(item) for item in value]
    return value
