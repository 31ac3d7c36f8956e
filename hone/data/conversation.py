"""Tokenizes a conversation and builds the loss mask over the assistant's turns.

Only the chat template defines how a turn opens and closes. Both are found by comparing renderings
that differ only in the text of one turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hone.data.prompts import Message, PromptError, Tools, render_prompt
from hone.tokenizer import Tokenizer
from hone.types import Settings

Encoded = tuple[list[int], list[int]]  # (input_ids, loss_mask), of equal length

PROBES = ("0", "1")
"""Two texts without a common token: whatever their renderings share comes from the template."""


def encode_conversation(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tools: Tools | None = None,
    template_kwargs: Settings | None = None,
    ignore_mismatch: bool = False,
    max_tokens: int | None = None,
) -> Encoded:
    """Returns ids and loss mask; the targets are the assistant's tokens and its end-of-turn token.

    A missing end token is added (`_Template.missing_end`). If the template rewrites earlier turns, for
    example drops their thinking, the separate turns differ from the full rendering. That is an error
    unless `ignore_mismatch` is set, which concatenates the turns as written.
    """
    template = _Template(messages, tokenizer, tools, template_kwargs, max_tokens)
    # A segment ends with an assistant turn, because before it a template may still change its output
    # (for example, close a block of tool results after the last one).
    stops = [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]
    last_answer = stops[-1] if stops else 0
    if last_answer < len(messages):
        stops.append(len(messages))
    rendered: list[int] = []
    ids: list[int] = []
    mask: list[int] = []
    between: list[int] = []
    for start, stop in zip([0, *stops], stops, strict=False):
        context, turns = list(messages[:start]), list(messages[start:stop])
        segment = template.after_context(rendered, context, turns)
        if segment is None:
            if not ignore_mismatch:
                raise PromptError(
                    f"the chat template renders what stands before turn {stop} otherwise once that"
                    " turn follows (earlier thinking dropped?); split the conversation into one row"
                    " per turn, or set data.ignore_input_ids_mismatch=true to learn the turns as"
                    " written"
                )
            segment = template.by_itself(context, turns)
        rendered += segment.ids
        end: list[int] = []
        if turns[-1]["role"] == "assistant":
            end = template.missing_end(is_last=stop >= last_answer)
        ids += segment.ids + end
        mask += [0] * (len(segment.ids) - segment.targets) + [1] * (segment.targets + len(end))
        between = segment.between
    return ids + between, mask + [0] * len(between)


class _Segment(NamedTuple):
    ids: list[int]
    """Token ids from the end of the previous assistant turn to the end of this one."""
    targets: int
    """Number of trailing ids that are the assistant's."""
    between: list[int]
    """Tokens after the end of the turn, often a newline; they are never targets."""


class _Template:
    def __init__(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        tools: Tools | None,
        template_kwargs: Settings | None,
        max_tokens: int | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._tools = tools
        self._kwargs = dict(template_kwargs or {})
        self._roles_in_parts = {m["role"] for m in messages if isinstance(m["content"], list)}
        roles = [message["role"] for message in messages]
        self._ending: list[int] = []
        self._between: list[int] = []
        if "assistant" in roles:
            before_first = messages[: roles.index("assistant")]
            self._ending, self._between = self._closing(before_first)

    def missing_end(self, *, is_last: bool) -> list[int]:
        """Returns the tokenizer's end token if the template closes the assistant's turn without it.

        If the template closes turns with nothing, every turn gets the token: the model must learn to stop
        after any turn. If it closes them with words or another token, only the last turn gets it, so that
        earlier turns match generation. No other target ever follows that closing, so the model learns to
        predict the end token after every one.
        """
        eos = self._tokenizer.eos_token_id
        if eos is None or eos in self._ending:
            return []
        return [int(eos)] if is_last or not self._ending else []

    def after_context(
        self, before: list[int], context: list[Message], turns: list[Message]
    ) -> _Segment | None:
        """Returns the turns after `before`, the rendered context; None if the template changes it."""
        ids = self._render([*context, *turns])
        start = len(before)
        if ids[:start] != before:
            return None
        if turns[-1]["role"] != "assistant":
            return _Segment(ids[start:], 0, [])
        begin = self._answer_start(context + turns[:-1], ids)
        return None if begin is None or begin < start else self._segment(ids, start, begin)

    def by_itself(self, context: list[Message], turns: list[Message]) -> _Segment:
        """Returns the turns as rendered after any answer, independent of the actual context."""
        before: list[Message] = []
        start = 0
        if not context:
            ids = self._render(turns)
        else:
            user = self._turn("user", "-")
            before, other = ([user, self._turn("assistant", text)] for text in PROBES)
            ids = self._render([*before, *turns])
            # Later turns may change how an answer is rendered, but never what follows its text.
            start = len(ids) - _shared_end(ids, self._render([*other, *turns]))
            start += _shared_start(self._ending, ids[start:])
        if turns[-1]["role"] != "assistant":
            return _Segment(ids[start:], 0, [])
        before_answer = before + turns[:-1]
        begin = self._answer_start(before_answer, ids)
        return self._segment(
            ids, start, self._header(before_answer, ids) if begin is None else begin
        )

    def _segment(self, ids: list[int], start: int, begin: int) -> _Segment:
        end = len(ids)
        if self._between and ids[-len(self._between) :] == self._between:
            end -= len(self._between)
        return _Segment(ids[start:end], max(0, end - begin), ids[end:])

    def _answer_start(self, context: list[Message], ids: list[int]) -> int | None:
        """Returns the first index of the assistant's tokens; None if an answer changes the context."""
        if all(message["role"] == "system" for message in context):
            return self._header(context, ids)  # many templates reject a generation prompt here
        opened = self._render(context, open_turn=True)
        begin = _shared_start(opened, ids)
        if begin < len(opened) and begin < _shared_start(opened, self._render(context)):
            return None
        return begin

    def _header(self, context: Sequence[Message], ids: list[int]) -> int:
        """Returns the index of an answer: the length of the common prefix of two different answers."""
        one, other = self._probe_answers(context)
        return min(_shared_start(one, other), _shared_start(one, ids))

    def _closing(self, context: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Returns the tokens that end a turn and those that the template writes after them."""
        one, other = self._probe_answers(context)
        if one == other:
            raise PromptError(
                "the chat template leaves out what the assistant says; use one that shows it"
                " (data.chat_template)"
            )
        closing = one[len(one) - _shared_end(one, other) :]
        eos = self._tokenizer.eos_token_id
        ends = [at + 1 for at, token in enumerate(closing) if token == eos]
        if not ends:  # another token or plain words
            words = (bool(self._tokenizer.decode([token]).strip()) for token in closing)
            ends = [at + 1 for at, is_word in enumerate(words) if is_word]
        # Whitespace ends a turn only if the tokenizer has no end token.
        end = ends[-1] if ends else len(closing) if eos is None else 0
        return closing[:end], closing[end:]

    def _probe_answers(self, context: Sequence[Message]) -> tuple[list[int], list[int]]:
        answers = (self._turn("assistant", text) for text in PROBES)
        one, other = (self._render([*context, answer]) for answer in answers)
        return one, other

    def _turn(self, role: str, text: str) -> Message:
        in_parts = role in self._roles_in_parts
        return {"role": role, "content": [{"type": "text", "text": text}] if in_parts else text}

    def _render(self, messages: Sequence[Message], open_turn: bool = False) -> list[int]:
        return render_prompt(
            list(messages),
            self._tokenizer,
            tools=self._tools,
            template_kwargs={**self._kwargs, "add_generation_prompt": open_turn},
            max_tokens=self._max_tokens,
        )


def _shared_start(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _shared_end(one: Sequence[int], other: Sequence[int]) -> int:
    return _shared_start(one[::-1], other[::-1])
