"""Tokenizes a conversation and builds the loss mask over the assistant's turns.

Renderings that differ only in the text of one turn show where the turn begins and ends in the
template's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hone.data.messages import Message, PromptError, Tools
from hone.data.prompt_ids import render_prompt
from hone.tokenizer import Tokenizer
from hone.types import Settings

TokensAndMask = tuple[list[int], list[int]]  # (input_ids, loss_mask), two lists of equal length

PROBES = ("0", "1")
"""Two texts without a common token: the common tokens of their renderings are the template's."""


def encode_conversation(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tools: Tools | None = None,
    template_kwargs: Settings | None = None,
    ignore_mismatch: bool = False,
    max_tokens: int | None = None,
) -> TokensAndMask:
    """Returns ids and loss mask; the targets are the assistant's tokens and its end-of-turn token.

    Raises PromptError if the template changes earlier turns, for example drops their thinking;
    with `ignore_mismatch`, the turns are instead concatenated as if each were the last.
    """
    template = _Template(messages, tokenizer, tools, template_kwargs, max_tokens)
    # A segment ends with an assistant turn, because a template may render the turns before it
    # together (for example, several tool results in one block).
    stops = [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]
    last_assistant_stop = stops[-1] if stops else 0
    if last_assistant_stop < len(messages):
        stops.append(len(messages))
    context_ids: list[int] = []
    ids: list[int] = []
    mask: list[int] = []
    separator: list[int] = []
    for start, stop in zip([0, *stops], stops, strict=False):
        context, turns = list(messages[:start]), list(messages[start:stop])
        segment = template.render_after_context(context_ids, context, turns)
        if segment is None:
            if not ignore_mismatch:
                raise PromptError(
                    f"adding turn {stop} changes how the chat template renders the earlier turns"
                    " (it may drop earlier thinking); split the conversation into one row per turn,"
                    " or set data.ignore_input_ids_mismatch=true to train on the turns as if each"
                    " were the last"
                )
            segment = template.render_after_probe(context, turns)
        context_ids += segment.ids
        end_ids: list[int] = []
        if turns[-1]["role"] == "assistant":
            end_ids = template.missing_end_tokens(is_last=stop >= last_assistant_stop)
        ids += segment.ids + end_ids
        num_targets = segment.num_targets + len(end_ids)
        mask += [0] * (len(segment.ids) - segment.num_targets) + [1] * num_targets
        # The next segment's ids begin with the separator; after the last segment, it is appended below.
        separator = segment.separator
    return ids + separator, mask + [0] * len(separator)


class _Segment(NamedTuple):
    """The tokens of an assistant turn and of the turns before it, up to the previous assistant turn."""

    ids: list[int]
    num_targets: int  # the last `num_targets` ids are the assistant's own
    separator: list[int]  # tokens after the end of the turn, often a newline; never targets


class _Template:
    """Renders the turns of one conversation and finds the assistant's tokens in them."""

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
        self._roles_with_parts = {
            message["role"] for message in messages if isinstance(message["content"], list)
        }
        roles = [message["role"] for message in messages]
        self._end_tokens: list[int] = []
        self._separator: list[int] = []
        if "assistant" in roles:
            context = messages[: roles.index("assistant")]
            self._end_tokens, self._separator = self._end_tokens_and_separator(context)

    def missing_end_tokens(self, *, is_last: bool) -> list[int]:
        """Returns the tokenizer's end token if the template ends the assistant's turn without it.

        If the template writes nothing at the end of a turn, every turn gets the end token. If it
        writes another token there, only the last turn gets the end token, as in a rollout.
        """
        eos = self._tokenizer.eos_token_id
        if eos is None or eos in self._end_tokens:
            return []
        return [int(eos)] if is_last or not self._end_tokens else []

    def render_after_context(
        self, context_ids: list[int], context: list[Message], turns: list[Message]
    ) -> _Segment | None:
        """Renders the turns after the context; returns None if the turns change `context_ids`."""
        ids = self._render([*context, *turns])
        start = len(context_ids)
        if ids[:start] != context_ids:
            return None
        if turns[-1]["role"] != "assistant":
            return _Segment(ids[start:], 0, [])
        answer_start = self._answer_start(context + turns[:-1], ids)
        if answer_start is None or answer_start < start:
            return None
        return self._segment(ids, start, answer_start)

    def render_after_probe(self, context: list[Message], turns: list[Message]) -> _Segment:
        """Renders the turns after a probe conversation instead of the context."""
        probe: list[Message] = []
        start = 0
        if not context:
            ids = self._render(turns)
        else:
            user = self._message("user", "-")
            probe, other_probe = ([user, self._message("assistant", text)] for text in PROBES)
            ids = self._render([*probe, *turns])
            # Later turns may change the rendering of an answer, but not of the text after it.
            start = len(ids) - _common_suffix_length(ids, self._render([*other_probe, *turns]))
            # The text after the probe's answer may begin with its end tokens.
            start += common_prefix_length(self._end_tokens, ids[start:])
        if turns[-1]["role"] != "assistant":
            return _Segment(ids[start:], 0, [])
        before_answer = probe + turns[:-1]
        answer_start = self._answer_start(before_answer, ids)
        if answer_start is None:
            answer_start = self._first_probe_difference(before_answer, ids)
        return self._segment(ids, start, answer_start)

    def _segment(self, ids: list[int], start: int, answer_start: int) -> _Segment:
        end = len(ids)
        if self._separator and ids[-len(self._separator) :] == self._separator:
            end -= len(self._separator)
        return _Segment(ids[start:end], max(0, end - answer_start), ids[end:])

    def _answer_start(self, context: list[Message], ids: list[int]) -> int | None:
        """Returns the index of the answer's first token; None if the answer changes the context."""
        if all(message["role"] == "system" for message in context):
            # Many templates reject a generation prompt before the first user turn.
            return self._first_probe_difference(context, ids)
        prompt_ids = self._render(context, add_generation_prompt=True)
        answer_start = common_prefix_length(prompt_ids, ids)
        if answer_start == len(prompt_ids):
            return answer_start
        context_length = common_prefix_length(prompt_ids, self._render(context))
        return None if answer_start < context_length else answer_start

    def _first_probe_difference(self, context: Sequence[Message], ids: list[int]) -> int:
        """Returns the first index at which `ids` and the renderings with probe answers are not all equal."""
        first, second = self._render_with_probe_answers(context)
        return min(common_prefix_length(first, second), common_prefix_length(first, ids))

    def _end_tokens_and_separator(self, context: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Returns (tokens with which the template ends a turn, tokens between two turns)."""
        first, second = self._render_with_probe_answers(context)
        if first == second:
            raise PromptError(
                "the chat template omits the assistant's text; use one that renders it"
                " (data.chat_template)"
            )
        closing = first[len(first) - _common_suffix_length(first, second) :]
        eos = self._tokenizer.eos_token_id
        end_indices = [index + 1 for index, token in enumerate(closing) if token == eos]
        if not end_indices:  # the template ends a turn with another token or with words
            texts = (self._tokenizer.decode([token]).strip() for token in closing)
            end_indices = [index + 1 for index, text in enumerate(texts) if text]
        if end_indices:
            end = end_indices[-1]
        else:  # whitespace ends a turn only if the tokenizer has no end token
            end = len(closing) if eos is None else 0
        return closing[:end], closing[end:]

    def _render_with_probe_answers(self, context: Sequence[Message]) -> tuple[list[int], list[int]]:
        answers = (self._message("assistant", text) for text in PROBES)
        first, second = (self._render([*context, answer]) for answer in answers)
        return first, second

    def _message(self, role: str, text: str) -> Message:
        has_parts = role in self._roles_with_parts
        return {"role": role, "content": [{"type": "text", "text": text}] if has_parts else text}

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False
    ) -> list[int]:
        return render_prompt(
            list(messages),
            self._tokenizer,
            tools=self._tools,
            template_kwargs={**self._kwargs, "add_generation_prompt": add_generation_prompt},
            max_tokens=self._max_tokens,
        )


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the number of equal ids at the start of both sequences."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def _common_suffix_length(first: Sequence[int], second: Sequence[int]) -> int:
    return common_prefix_length(first[::-1], second[::-1])
