"""Renders tool and user turns to token ids that are appended to the model's tokens.

The chat template renders only what follows an assistant turn, so the model's tokens are never tokenised
again and no separator between turns is lost. `drifts` reports templates that would render the earlier
turns differently (for example, without their thinking).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hone.data.chat_template import BrokenTemplate, apply_template
from hone.data.prompts import FAR_CHARACTERS, Message, PromptError, render_prompt, truncate
from hone.text import clean_text, clean_values, described
from hone.tokenizer import Tokenizer
from hone.types import Settings

_SPOKEN = "QZ7assistantturnQZ7"
"""Placeholder for the model's turn while a template renders what follows it."""
_CUT = "(truncated)"
_FITTING_ATTEMPTS = 8
"""Renderings of a prompt whose observation is truncated: tokens at the border may split differently."""
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
    """Returns the token ids of new messages after the model's turn, with the next generation prompt.

    `last_token` is the turn's last id: an end token that the model generated is not repeated.
    """
    messages = [_without_mark(clean_values(message)) for message in messages]
    if not (chat and getattr(tokenizer, "chat_template", None)):
        return _encoded("".join(_plain(message) for message in messages), tokenizer)
    text = clean_text(_rendered(messages, tokenizer, template_kwargs))
    end_text = tokenizer.decode([last_token], skip_special_tokens=False)
    is_special = not tokenizer.decode([last_token], skip_special_tokens=True)
    if not is_special and not (len(end_text.strip()) > 1 and text.startswith(end_text)):
        return _encoded(text, tokenizer)
    text = text.removeprefix(end_text)
    # A tokenizer may split text differently after a special token than at the start.
    ids = _encoded(end_text + text, tokenizer)
    return ids[1:] if ids[:1] == [last_token] else _encoded(text, tokenizer)


def _encoded(text: str, tokenizer: Tokenizer) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def _rendered(messages: Sequence[Message], tokenizer: Tokenizer, kwargs: Settings) -> str:
    """Returns what the template writes after an assistant turn: its end, the messages, the next start."""
    turn: Message = {"role": "assistant", "content": _SPOKEN}

    def text_of(talk: Sequence[Message], generate: bool) -> str:
        options = {**kwargs, "add_generation_prompt": generate}
        return str(apply_template([_QUESTION, *talk], tokenizer, tokenize=False, **options))

    try:
        try:
            whole = text_of([turn, *messages], True)
        except BrokenTemplate:
            raise
        except Exception:  # the template may require the tool call before its answer
            call_turn = [{"role": "assistant", "content": "", "tool_calls": [_CALL]}]
            answers = [{"tool_call_id": _CALL["id"], **message} for message in messages]
            before, after = text_of(call_turn, False), text_of([*call_turn, *answers], True)
            if not after.startswith(before):
                raise
            whole = text_of([turn], False) + after[len(before) :]
    except BrokenTemplate:
        raise
    except Exception as error:  # a template is third-party code
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
    """Removes the placeholder of the model's turn, because only the text after it is used."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    while _SPOKEN in content:
        content = content.replace(_SPOKEN, "")
    return {**message, "content": content}


def _plain(message: Message) -> str:
    """Formats a turn without a template: tool answers in Hermes tags, user text on separate lines."""
    if message["role"] == "tool":
        return f"\n<tool_response>\n{message['content']}\n</tool_response>\n"
    return f"\n{message['content']}\n"


class Drift(NamedTuple):
    """A conversation that the template renders differently from what the loop appends."""

    case: str
    problem: str


def drifts(
    tokenizer: Tokenizer, template_kwargs: Settings, roles: Sequence[str] = tuple(_REPLIES)
) -> Iterator[Drift | str]:
    """Compares appended with fully rendered turns; yields a `Drift`, or the name of an equal case."""
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
    """Returns the first difference, None if both are equal, "" if the template has no such turn."""
    prompt = render_prompt([_QUESTION], tokenizer, template_kwargs=kwargs)
    starts_thinking = tokenizer.decode(prompt).rstrip().endswith("<think>")
    if starts_thinking and not text.startswith("<think>"):
        return ""
    turn_ids = _encoded(text.removeprefix("<think>\n") if starts_thinking else text, tokenizer)
    end = next(iter(_encoded(_rendered([reply], tokenizer, kwargs), tokenizer)), None)
    if end is not None and not tokenizer.decode([end], skip_special_tokens=True):
        turn_ids.append(end)
    glue = observation_ids(
        [reply], tokenizer, last_token=turn_ids[-1], template_kwargs=kwargs, chat=True
    )
    appended = [*prompt, *turn_ids, *glue]
    talk = [_QUESTION, {"role": "assistant", "content": text}, reply]
    try:
        whole = render_prompt(talk, tokenizer, template_kwargs=kwargs)
    except PromptError:  # the template requires a call before an answer
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


def with_observation(
    prompt: str | list[Message],
    observation: str,
    render: Callable[[str | list[Message]], list[int]],
    tokenizer: Tokenizer,
    limit: int,
    side: str,
) -> tuple[list[int], str]:
    """Returns the ids of a prompt that ends with an environment's first observation, and the observation.

    The observation is truncated so that at most `limit` ids remain, whatever `data.truncation` is.
    """
    text = cut_text(observation, FAR_CHARACTERS * limit, side)
    ids = _ending_with(text, prompt, render)
    tokens: list[int] = []
    for attempt in range(_FITTING_ATTEMPTS):
        if len(ids) <= limit:
            return ids, text
        tokens = tokens or _encoded(text, tokenizer)
        count = max(len(tokens) - (len(ids) - limit), 0) if attempt < _FITTING_ATTEMPTS - 1 else 0
        tokens = truncate(tokens, count, side)
        text = clean_text(tokenizer.decode(tokens, skip_special_tokens=True)) if tokens else ""
        ids = _ending_with(text, prompt, render)
    return truncate(ids, limit, "left"), text


def _ending_with(
    text: str, prompt: str | list[Message], render: Callable[[str | list[Message]], list[int]]
) -> list[int]:
    if isinstance(prompt, str):  # pre-rendered text
        return render(f"{prompt}{_plain({'role': 'user', 'content': text})}")
    try:
        return render([*prompt, {"role": "user", "content": text}])
    except PromptError:  # the template may require that roles alternate
        last = prompt[-1]
        if last["role"] != "user" or not isinstance(last["content"], str):
            raise
        return render([*prompt[:-1], {**last, "content": f"{last['content']}\n\n{text}"}])


def cut_text(text: str, longest_chars: int, side: str) -> str:
    """Truncates to `longest_chars`: `left` drops the start, `right` the end, `middle` the middle."""
    if len(text) <= longest_chars:
        return text
    if side == "right":
        return f"{text[:longest_chars]}...{_CUT}"
    if side == "left":
        return f"{_CUT}...{text[-longest_chars:]}"
    head = longest_chars // 2
    return f"{text[:head]}...{_CUT}...{text[len(text) - (longest_chars - head) :]}"


def cut_tokens(text: str, tokenizer: Tokenizer, longest_tokens: int | None, side: str) -> str:
    """Truncates to `longest_tokens`; the tags around the text are added later and stay complete."""
    if longest_tokens is None:
        return text
    ids = tokenizer.encode(clean_text(text), add_special_tokens=False)
    if len(ids) <= longest_tokens:
        return text
    return tokenizer.decode(truncate(ids, longest_tokens, side), skip_special_tokens=True)
