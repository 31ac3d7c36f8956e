"""Renders tool and user messages to token ids that are appended to the model's tokens.

The chat template renders only the text after an assistant turn, so the model's tokens are never
tokenised again. `compare_with_template` reports templates that render earlier turns differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hone.data.chat_template import BrokenTemplate, apply_template
from hone.data.conversation import common_prefix_length
from hone.data.messages import Message, PromptError
from hone.data.prompt_ids import render_prompt
from hone.data.prompts import MAX_CHARACTERS_PER_TOKEN, tokenise, truncate
from hone.text import clean_text, clean_values, error_text
from hone.tokenizer import Tokenizer
from hone.types import Fields, Settings

_PLACEHOLDER = "QZ7assistantturnQZ7"
"""Stands for the model's turn while a template renders the messages after it."""
_TRUNCATED = "(truncated)"
_TRUNCATION_ATTEMPTS = 8
"""Maximum number of truncations, because the text of truncated ids may tokenise to more ids."""
_QUESTION: Message = {"role": "user", "content": "What is 2+2?"}
_CALL: Fields = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 2}},
}
_ASSISTANT_TURNS = {
    "a plain turn": "It is 4.",
    "a turn that thinks": "<think>\nTwo and two.\n</think>\n\nIt is 4.",
}
_REPLIES: dict[str, Message] = {
    "tool": {"role": "tool", "content": "4", "name": "add", "tool_call_id": "call00000"},
    "user": {"role": "user", "content": "Are you sure?"},
}


def observation_ids(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    last_token: int,
    template_kwargs: Settings,
    chat: bool,
) -> list[int]:
    """Returns the token ids of messages after a model turn, with the next generation prompt.

    `last_token` is the last id of the turn; if it is an end token, the result does not repeat it.
    Without `chat`, the messages are formatted without the chat template.
    """
    messages = [_remove_placeholder(clean_values(message)) for message in messages]
    if not (chat and getattr(tokenizer, "chat_template", None)):
        return tokenise("".join(map(_format_without_template, messages)), tokenizer)
    end_text = tokenizer.decode([last_token], skip_special_tokens=False)
    is_special = not tokenizer.decode([last_token], skip_special_tokens=True)
    end_token = end_text if is_special else None
    text = clean_text(_render_after_assistant(messages, tokenizer, template_kwargs, end_token))
    if not is_special and not (len(end_text.strip()) > 1 and text.startswith(end_text)):
        return tokenise(text, tokenizer)
    text = text.removeprefix(end_text)
    # A tokenizer may split text differently after a special token than at the start.
    ids = tokenise(end_text + text, tokenizer)
    return ids[1:] if ids[:1] == [last_token] else tokenise(text, tokenizer)


def _render_after_assistant(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    kwargs: Settings,
    end_token: str | None = None,
) -> str:
    """Returns the template's text from the end of an assistant turn (usually `end_token`) on."""
    turn: Message = {"role": "assistant", "content": _PLACEHOLDER}

    def render_text(turns: Sequence[Message], add_generation_prompt: bool) -> str:
        options = {**kwargs, "add_generation_prompt": add_generation_prompt}
        return str(apply_template([_QUESTION, *turns], tokenizer, tokenize=False, **options))

    try:
        try:
            text = render_text([turn, *messages], True)
        except BrokenTemplate:
            raise
        except Exception:  # the template may require the tool call before its answer
            calls = []
            for message in messages:
                function = {"name": message.get("name", "add"), "arguments": {"a": 2}}
                call_id = message.get("tool_call_id", _CALL["id"])
                calls.append({"id": call_id, "type": "function", "function": function})
            call_turn = {"role": "assistant", "content": "", "tool_calls": calls}
            answers = [{"tool_call_id": _CALL["id"], **message} for message in messages]
            call_text = render_text([call_turn], False)
            full_text = render_text([call_turn, *answers], True)
            if not full_text.startswith(call_text):
                raise
            if end_token is not None and call_text.endswith(end_token):
                return end_token + full_text[len(call_text) :]
            text = render_text([turn], False) + full_text[len(call_text) :]
    except BrokenTemplate:
        raise
    except Exception as error:  # a template is third-party code
        roles = ", ".join(sorted({str(message["role"]) for message in messages}))
        raise PromptError(
            f"the tokenizer's chat template cannot render a turn of {roles}: {error_text(error)}; "
            "use a template that knows these roles (actor_rollout_ref.model.custom_chat_template)"
        ) from error
    _, placeholder, following_text = text.rpartition(_PLACEHOLDER)
    if not placeholder:
        raise PromptError(
            "the tokenizer's chat template omits the assistant's turn, so no turn can be appended"
        )
    return following_text


def _remove_placeholder(message: Message) -> Message:
    """Removes placeholders from a message, because text before the last placeholder would be lost."""
    clean_message = dict(message)
    for key, value in clean_message.items():
        while isinstance(value, str) and _PLACEHOLDER in value:
            value = clean_message[key] = value.replace(_PLACEHOLDER, "")
    return clean_message


def _format_without_template(message: Message) -> str:
    """Formats a message without a chat template: a tool answer in Hermes tags."""
    if message["role"] == "tool":
        return f"\n<tool_response>\n{message['content']}\n</tool_response>\n"
    return f"\n{message['content']}\n"


class TemplateMismatch(NamedTuple):
    """A case in which the appended tokens differ from the template's rendering."""

    case: str
    problem: str


def compare_with_template(
    tokenizer: Tokenizer, template_kwargs: Settings, roles: Sequence[str] = tuple(_REPLIES)
) -> Iterator[TemplateMismatch | str]:
    """Compares appended turns with the template's rendering; yields the name or the mismatch of each case."""
    for role in roles:
        for name, text in _ASSISTANT_TURNS.items():
            case = f"a {role} answers {name}"
            try:
                prompt = render_prompt([_QUESTION], tokenizer, template_kwargs=template_kwargs)
                starts_thinking = tokenizer.decode(prompt).rstrip().endswith("<think>")
                if starts_thinking and not text.startswith("<think>"):
                    continue  # after this prompt, every turn thinks
                reply = _REPLIES[role]
                problem = _difference(prompt, text, reply, tokenizer, template_kwargs)
            except (PromptError, BrokenTemplate) as error:
                problem = str(error)
            yield TemplateMismatch(case, problem) if problem else case


def _difference(
    prompt: list[int], text: str, reply: Message, tokenizer: Tokenizer, kwargs: Settings
) -> str | None:
    """Returns the first difference between the appended and the rendered tokens, or None."""
    starts_thinking = tokenizer.decode(prompt).rstrip().endswith("<think>")
    turn_ids = tokenise(text.removeprefix("<think>\n") if starts_thinking else text, tokenizer)
    end_ids = tokenise(_render_after_assistant([reply], tokenizer, kwargs), tokenizer)[:1]
    if end_ids and not tokenizer.decode(end_ids, skip_special_tokens=True):
        turn_ids += end_ids
    observation = observation_ids(
        [reply], tokenizer, last_token=turn_ids[-1], template_kwargs=kwargs, chat=True
    )
    appended_ids = [*prompt, *turn_ids, *observation]
    messages = [_QUESTION, {"role": "assistant", "content": text}, reply]
    try:
        rendered_ids = render_prompt(messages, tokenizer, template_kwargs=kwargs)
    except PromptError:  # the template requires a call before an answer
        messages[1]["tool_calls"] = [_CALL]
        rendered_ids = render_prompt(messages, tokenizer, template_kwargs=kwargs)
    if appended_ids == rendered_ids:
        return None
    start = common_prefix_length(appended_ids, rendered_ids)
    excerpts = [tokenizer.decode(ids[start : start + 12]) for ids in (appended_ids, rendered_ids)]
    return f"from token {start} the loop has {excerpts[0]!r}, the template {excerpts[1]!r}"


def render_with_observation(
    prompt: str | list[Message],
    observation: str,
    render: Callable[[str | list[Message]], list[int]],
    tokenizer: Tokenizer,
    max_tokens: int,
    side: str,
) -> tuple[list[int], str]:
    """Returns (ids of the prompt with the observation at its end, observation truncated to fit)."""
    text = truncate_text(observation, MAX_CHARACTERS_PER_TOKEN * max_tokens, side)
    ids = _render_ending_with(text, prompt, render)
    tokens: list[int] = []
    for num_attempts_left in reversed(range(_TRUNCATION_ATTEMPTS)):
        if len(ids) <= max_tokens:
            return ids, text
        tokens = tokens or tokenise(text, tokenizer)
        # The last attempt removes the whole text.
        surplus = len(ids) - max_tokens if num_attempts_left else len(tokens)
        tokens = truncate(tokens, max(len(tokens) - surplus, 0), side)
        text = clean_text(tokenizer.decode(tokens, skip_special_tokens=True)) if tokens else ""
        ids = _render_ending_with(text, prompt, render)
    return truncate(ids, max_tokens, "left"), text


def _render_ending_with(
    text: str, prompt: str | list[Message], render: Callable[[str | list[Message]], list[int]]
) -> list[int]:
    if isinstance(prompt, str):  # pre-rendered text
        return render(f"{prompt}{_format_without_template({'role': 'user', 'content': text})}")
    try:
        return render([*prompt, {"role": "user", "content": text}])
    except PromptError:  # the template may require that roles alternate
        last = prompt[-1]
        if last["role"] != "user" or not isinstance(last["content"], str):
            raise
        return render([*prompt[:-1], {**last, "content": f"{last['content']}\n\n{text}"}])


def truncate_text(text: str, max_chars: int, side: str) -> str:
    """Drops the `left`, `right` or `middle` part of a text longer than `max_chars`; adds a marker."""
    if len(text) <= max_chars:
        return text
    if side == "right":
        return f"{text[:max_chars]}...{_TRUNCATED}"
    if side == "left":
        return f"{_TRUNCATED}...{text[-max_chars:]}"
    head = max_chars // 2
    return f"{text[:head]}...{_TRUNCATED}...{text[len(text) - (max_chars - head) :]}"


def truncate_tokens(text: str, tokenizer: Tokenizer, max_tokens: int | None, side: str) -> str:
    """Drops the `side` part of a text longer than `max_tokens`; None means no limit."""
    if max_tokens is None:
        return text
    ids = tokenizer.encode(clean_text(text), add_special_tokens=False)
    if len(ids) <= max_tokens:
        return text
    return tokenizer.decode(truncate(ids, max_tokens, side), skip_special_tokens=True)
