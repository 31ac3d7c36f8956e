"""What tools and users say, as tokens that follow the model's own: text is rendered, ids are appended.

The chat template is asked only for what stands after an assistant turn, so nothing the model wrote is
tokenised again and no glue between turns is lost. Where the template would render the earlier turns
otherwise (it drops their thinking, say), `drifts` tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hone.data.chat_template import BrokenTemplate, apply_template
from hone.data.prompts import Message, PromptError, render_prompt, truncate
from hone.text import clean_text, clean_values, described
from hone.tokenizer import Tokenizer
from hone.types import Settings

_SPOKEN = "QZ7assistantturnQZ7"
"""Stands for the model's turn while a template renders what follows it."""
_CUT = "(truncated)"
_QUESTION: Message = {"role": "user", "content": "What is 2+2?"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
_TURNS = {
    "a plain turn": "It is 4.",
    "a turn that thinks": "<think>\nTwo and two.\n</think>\n\nIt is 4.",
}
_REPLIES: dict[str, Message] = {
    "tool": {"role": "tool", "content": "4", "tool_call_id": "call00000"},
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
    """Token ids of new messages after the model's turn, up to where it speaks next.

    `last_token` is the turn's last id: an end token the model wrote itself is not written twice.
    """
    messages = [_without_mark(clean_values(message)) for message in messages]
    if not (chat and getattr(tokenizer, "chat_template", None)):
        return _encoded("".join(_plain(message) for message in messages), tokenizer)
    text = clean_text(_rendered(messages, tokenizer, template_kwargs))
    ended = tokenizer.decode([last_token], skip_special_tokens=False)
    is_special = not tokenizer.decode([last_token], skip_special_tokens=True)
    if not is_special and not (len(ended.strip()) > 1 and text.startswith(ended)):
        return _encoded(text, tokenizer)
    text = text.removeprefix(ended)
    # After a special token a tokenizer may split text otherwise than at the start of a text.
    ids = _encoded(ended + text, tokenizer)
    return ids[1:] if ids[:1] == [last_token] else _encoded(text, tokenizer)


def _encoded(text: str, tokenizer: Tokenizer) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def _rendered(messages: Sequence[Message], tokenizer: Tokenizer, kwargs: Settings) -> str:
    """What the template writes after an assistant turn: its end, the messages, the next turn's start."""
    turn: Message = {"role": "assistant", "content": _SPOKEN}

    def text_of(talk: Sequence[Message], generate: bool) -> str:
        options = {**kwargs, "add_generation_prompt": generate}
        return str(apply_template([_QUESTION, *talk], tokenizer, tokenize=False, **options))

    try:
        try:
            whole = text_of([turn, *messages], True)
        except BrokenTemplate:
            raise
        except Exception:  # the template may want an answer's call before it
            called = [{"role": "assistant", "content": "", "tool_calls": [_CALL]}]
            answers = [{"tool_call_id": _CALL["id"], **message} for message in messages]
            before, after = text_of(called, False), text_of([*called, *answers], True)
            if not after.startswith(before):
                raise
            whole = text_of([turn], False) + after[len(before) :]
    except BrokenTemplate:
        raise
    except Exception as error:  # a template is foreign code
        roles = ", ".join(sorted({str(m["role"]) for m in messages}))
        raise PromptError(
            f"the tokenizer's chat template cannot render a turn of {roles}: {described(error)}; use "
            "a template that knows these roles (actor_rollout_ref.model.custom_chat_template)"
        ) from error
    _, mark, rest = whole.rpartition(_SPOKEN)
    if not mark:
        raise PromptError(
            "the tokenizer's chat template leaves out the assistant's turn, so turns cannot follow it"
        )
    return rest


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


class Drift(NamedTuple):
    """A conversation that the template renders otherwise than the loop appends it."""

    case: str
    problem: str


def drifts(
    tokenizer: Tokenizer, template_kwargs: Settings, roles: Sequence[str] = tuple(_REPLIES)
) -> Iterator[Drift | str]:
    """Two turns of each kind, appended and rendered whole: a `Drift`, or the name of an equal case."""
    for role in roles:
        for name, text in _TURNS.items():
            case = f"a {role} answers {name}"
            try:
                problem = _difference(text, _REPLIES[role], tokenizer, template_kwargs)
            except (PromptError, BrokenTemplate) as error:
                problem = str(error)
            if problem != "":
                yield Drift(case, problem) if problem else case


def _difference(text: str, reply: Message, tokenizer: Tokenizer, kwargs: Settings) -> str | None:
    """Where both part; None where they are equal, "" where the template has no such turn."""
    prompt = render_prompt([_QUESTION], tokenizer, template_kwargs=kwargs)
    opened = tokenizer.decode(prompt).rstrip().endswith("<think>")
    if opened and not text.startswith("<think>"):
        return ""
    spoken = _encoded(text.removeprefix("<think>\n") if opened else text, tokenizer)
    end = next(iter(_encoded(_rendered([reply], tokenizer, kwargs), tokenizer)), None)
    if end is not None and not tokenizer.decode([end], skip_special_tokens=True):
        spoken.append(end)
    glue = observation_ids(
        [reply], tokenizer, last_token=spoken[-1], template_kwargs=kwargs, chat=True
    )
    appended = [*prompt, *spoken, *glue]
    talk = [_QUESTION, {"role": "assistant", "content": text}, reply]
    try:
        whole = render_prompt(talk, tokenizer, template_kwargs=kwargs)
    except PromptError:  # the template wants a call before an answer
        talk[1]["tool_calls"] = [_CALL]
        whole = render_prompt(talk, tokenizer, template_kwargs=kwargs)
    if appended == whole:
        return None
    at = next(
        (i for i, pair in enumerate(zip(appended, whole, strict=False)) if len({*pair}) > 1),
        len(whole),
    )
    rest = [tokenizer.decode(ids[at : at + 12]) for ids in (appended, whole)]
    return f"from token {at} the loop has {rest[0]!r}, the template {rest[1]!r}"


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
    return tokenizer.decode(truncate(ids, longest_tokens, side), skip_special_tokens=True)
