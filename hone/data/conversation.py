"""A conversation as token ids, and which of them the assistant wrote.

Only the chat template knows how a turn opens and closes: both are read off its renderings, by
comparing some that differ in the text of one turn. Leaves out rows and files: those are sft.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hone.data.prompts import Message, PromptError, Tools, render_prompt
from hone.tokenizer import Tokenizer
from hone.types import Settings

Encoded = tuple[list[int], list[int]]  # (input_ids, loss_mask), one length

STAND_INS = ("0", "1")
"""Two texts that share no token: what their renderings share, the template wrote."""


def encode_conversation(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tools: Tools | None = None,
    template_kwargs: Settings | None = None,
    ignore_mismatch: bool = False,
    max_tokens: int | None = None,
) -> Encoded:
    """What the assistant wrote, with the token that ends its turn, is learnt; all else is shown.

    An end token that the template lacks is put where it belongs (`_Template.missing_end`).
    A template that rewrites earlier turns (drops their thinking, say) makes the turns differ from
    the whole; that is an error unless `ignore_mismatch`, which then joins the turns as written.
    """
    template = _Template(messages, tokenizer, tools, template_kwargs, max_tokens)
    rendered: list[int] = []
    ids: list[int] = []
    mask: list[int] = []
    between: list[int] = []
    for start, stop in _stretches(messages):
        context, turns = list(messages[:start]), list(messages[start:stop])
        stretch = template.continued(rendered, context, turns)
        if stretch is None:
            if not ignore_mismatch:
                raise PromptError(
                    f"the chat template renders what stands before turn {stop} otherwise once that"
                    " turn follows (earlier thinking dropped?); split the conversation into one row"
                    " a turn, or set data.ignore_input_ids_mismatch=true to learn the turns as"
                    " written"
                )
            stretch = template.by_itself(context, turns)
        rendered += stretch.ids
        end: list[int] = []
        if turns[-1]["role"] == "assistant":
            end = template.missing_end(
                is_last=all(m["role"] != "assistant" for m in messages[stop:])
            )
        ids += stretch.ids + end
        mask += [0] * (len(stretch.ids) - stretch.learnt) + [1] * (stretch.learnt + len(end))
        between = stretch.between
    return ids + between, mask + [0] * len(between)


def _stretches(messages: Sequence[Message]) -> list[tuple[int, int]]:
    """Up to each assistant turn, and what follows the last: in between a template may still change
    what it wrote (it closes a block of tool results after the last of them)."""
    stops = [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not stops or stops[-1] < len(messages):
        stops.append(len(messages))
    return list(zip([0, *stops], stops, strict=False))


class _Stretch(NamedTuple):
    """Turns up to and with one of the assistant's."""

    ids: list[int]
    """From the end of the assistant's turn before to the end of this one."""
    learnt: int
    """How many of them, at their end, the assistant wrote."""
    between: list[int]
    """What the template writes after a turn has ended: a newline, often. Never learnt."""


class _Template:
    """The tokenizer's chat template with the options of the run, on one conversation."""

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
        self._in_parts = {m["role"] for m in messages if isinstance(m["content"], list)}
        roles = [message["role"] for message in messages]
        self._ending: list[int] = []
        self._between: list[int] = []
        if "assistant" in roles:
            before_first = messages[: roles.index("assistant")]
            self._ending, self._between = self._closing(before_first)

    def missing_end(self, *, is_last: bool) -> list[int]:
        """The tokenizer's end token, where the template ends the assistant's turn without it.

        A turn that the template closes with nothing gets it each time: asked for any turn, the
        model must stop. One that closes with words, or a token that is not the end, gets it after
        the last alone, so that earlier turns stay as generation will show them: as nothing else is
        ever learnt to follow that closing, the end follows it everywhere.
        """
        eos = self._tokenizer.eos_token_id
        if eos is None or eos in self._ending:
            return []
        return [int(eos)] if is_last or not self._ending else []

    def continued(
        self, before: list[int], context: list[Message], turns: list[Message]
    ) -> _Stretch | None:
        """The turns as they follow `before`, the rendered context; None where it is not so."""
        shown = self._render([*context, *turns])
        start = len(before)
        if shown[:start] != before:
            return None
        if turns[-1]["role"] != "assistant":
            return _Stretch(shown[start:], 0, [])
        begin = self._opened(context + turns[:-1], shown)
        return None if begin is None or begin < start else self._stretch(shown, start, begin)

    def by_itself(self, context: list[Message], turns: list[Message]) -> _Stretch:
        """The turns as they follow any answer, whatever became of the context before them."""
        if context:
            before, shown, start = self._after_an_answer(turns)
        else:
            before, shown, start = [], self._render(turns), 0
        if turns[-1]["role"] != "assistant":
            return _Stretch(shown[start:], 0, [])
        asked = before + turns[:-1]
        begin = self._opened(asked, shown)
        return self._stretch(shown, start, self._header(asked, shown) if begin is None else begin)

    def _after_an_answer(self, turns: list[Message]) -> tuple[list[Message], list[int], int]:
        """A short conversation before the turns, all of it rendered, and where its answer ends."""
        user = self._turn("user", "-")
        before, other = ([user, self._turn("assistant", text)] for text in STAND_INS)
        shown = self._render([*before, *turns])
        # That turns follow may change how an answer is shown, never what comes after its text.
        start = len(shown) - _shared_end(shown, self._render([*other, *turns]))
        return before, shown, start + _shared_start(self._ending, shown[start:])

    def _stretch(self, shown: list[int], start: int, begin: int) -> _Stretch:
        end = len(shown)
        if self._between and shown[-len(self._between) :] == self._between:
            end -= len(self._between)
        return _Stretch(shown[start:end], max(0, end - begin), shown[end:])

    def _opened(self, context: list[Message], shown: list[int]) -> int | None:
        """Where the assistant's own tokens begin: after what opens its turn at generation.

        None where the context is rendered otherwise once it is answered.
        """
        if all(message["role"] == "system" for message in context):
            return self._header(context, shown)  # nothing to answer: many templates refuse that
        opened = self._render(context, open_turn=True)
        begin = _shared_start(opened, shown)
        if begin < len(opened) and begin < _shared_start(opened, self._render(context)):
            return None
        return begin

    def _header(self, context: Sequence[Message], shown: list[int]) -> int:
        """Where an answer begins: up to there two different ones are rendered alike."""
        one, other = self._answered(context)
        return min(_shared_start(one, other), _shared_start(one, shown))

    def _closing(self, context: Sequence[Message]) -> tuple[list[int], list[int]]:
        """What ends a turn (its end token, if any) and what the template writes after that."""
        one, other = self._answered(context)
        if one == other:
            raise PromptError(
                "the chat template leaves out what the assistant says; use one that shows it"
                " (data.chat_template)"
            )
        closing = one[len(one) - _shared_end(one, other) :]
        eos = self._tokenizer.eos_token_id
        ends = [at + 1 for at, token in enumerate(closing) if token == eos]
        if not ends:  # another token or plain words
            ends = [at + 1 for at, token in enumerate(closing) if self._is_word(token)]
        # White space ends a turn only where nothing else can.
        end = ends[-1] if ends else len(closing) if eos is None else 0
        return closing[:end], closing[end:]

    def _is_word(self, token: int) -> bool:
        return bool(self._tokenizer.decode([token]).strip())

    def _answered(self, context: Sequence[Message]) -> tuple[list[int], list[int]]:
        answers = (self._turn("assistant", text) for text in STAND_INS)
        one, other = (self._render([*context, answer]) for answer in answers)
        return one, other

    def _turn(self, role: str, text: str) -> Message:
        """A stand-in, in the form that the conversation's own turns of this role have."""
        in_parts = role in self._in_parts
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
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _shared_end(one: Sequence[int], other: Sequence[int]) -> int:
    return _shared_start(one[::-1], other[::-1])
