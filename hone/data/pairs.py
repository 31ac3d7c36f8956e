"""Pairs of a chosen and a rejected response to one prompt, for reward models.

Both sequences are encoded as in RL: the policy's prompt, the response and the end token, at which
the model scores the response.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hone.config.sft import PairDataConfig
from hone.data.encoded import EncodedDataset, EncodedRow, UntrainableRow, check_row_text
from hone.data.messages import Message, PromptError, as_messages, check_message_roles
from hone.text import short_repr
from hone.types import Row

_TURN_START = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant", "human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class Pair:
    """A prompt with a better and a worse response."""

    prompt: str | list[Message]
    chosen: str
    rejected: str
    margin: float = 0.0

    @property
    def first_user_turn(self) -> str:
        """The text of the first user turn."""
        if isinstance(self.prompt, str):
            return self.prompt
        return next((str(m["content"]) for m in self.prompt if m["role"] == "user"), "")


class PairDataset(EncodedDataset):
    """Rows with `prompt`, `chosen` and `rejected`, or with two whole dialogues.

    `dataset[i]` is {"input_ids", "rejected_ids", "prompt_tokens", "margin"}; `prompt_tokens` is a list with
    the number of prompt tokens.
    """

    config: PairDataConfig

    def pair(self, row: Row) -> Pair:
        """Returns the pair of a row; raises PromptError on a bad row."""
        return read_pair(row, self.config)

    def check(self, row: Row) -> None:
        check_row_text(row)
        pair = self.pair(row)
        check_pair(pair)
        if not self.config.drop_duplicates:
            return
        pairs_seen: set[tuple[str, str, str]] = self.__dict__.setdefault("_pairs_seen", set())
        prompt, chosen, rejected = str(pair.prompt), pair.chosen.strip(), pair.rejected.strip()
        if (prompt, chosen, rejected) in pairs_seen:
            raise UntrainableRow("duplicate", "an earlier row has the same pair")
        if (prompt, rejected, chosen) in pairs_seen:
            raise UntrainableRow(
                "contradiction", "an earlier row has the pair in the opposite order"
            )
        pairs_seen.add((prompt, chosen, rejected))

    def encode_row(self, row: Row) -> EncodedRow:
        pair = self.pair(row)
        prompt = self.render(pair.prompt)
        eos = self.tokenizer.eos_token_id
        end = [] if eos is None else [int(eos)]
        chosen, rejected = self.tokenise(pair.chosen) + end, self.tokenise(pair.rejected) + end
        if not chosen or not rejected:
            raise UntrainableRow("empty response", "a response of the pair has no tokens")
        response_length = max(len(chosen), len(rejected))
        self.check_length(len(prompt) + response_length)
        prompt = truncate_prompt(prompt, response_length, self.max_length)
        return {
            "input_ids": prompt + chosen,
            "rejected_ids": prompt + rejected,
            "prompt_tokens": [len(prompt)],
            "margin": [pair.margin],
        }


def read_pair(row: Row, config: PairDataConfig) -> Pair:
    """Returns the pair of a row; raises PromptError on a bad row."""
    chosen, rejected = row.get(config.chosen_key), row.get(config.rejected_key)
    for key, value in ((config.chosen_key, chosen), (config.rejected_key, rejected)):
        if value is None:
            columns = ", ".join(map(str, row))
            raise PromptError(f"column {key!r} is missing or empty; the row has {columns}")
    prompt = row.get(config.prompt_key)
    if prompt is None and row.get("conversations") is not None:
        prompt = _as_turns(row["conversations"])
    if prompt is None:
        prompt, chosen_text = split_dialogue(chosen)
        rejected_prompt, rejected_text = split_dialogue(rejected)
        if prompt != rejected_prompt:
            raise PromptError("the two dialogues differ before their last turn")
    else:
        chosen_text, rejected_text = response_text(chosen), response_text(rejected)
        prompt = prompt if isinstance(prompt, str) else as_messages(prompt)
    margin = row.get(config.margin_key)
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
    # The comparison is false for NaN, and for integers that are too large for a float.
    if margin is not None and not (is_number and abs(margin) <= sys.float_info.max):
        raise PromptError(
            f"column {config.margin_key!r} must be a number, got {short_repr(margin)}"
        )
    return Pair(prompt, chosen_text, rejected_text, float(margin or 0.0))


def check_pair(pair: Pair) -> None:
    """Raises PromptError if nothing can be learnt from a pair."""
    check_message_roles(as_messages(pair.prompt))
    if not pair.chosen.strip() or not pair.rejected.strip():
        raise UntrainableRow("empty response", "a response of the pair is empty")
    if pair.chosen.strip() == pair.rejected.strip():
        raise UntrainableRow("tie", "the two responses of the pair are the same")


def truncate_prompt(prompt: list[int], response_length: int, max_length: int) -> list[int]:
    """Drops the start of a prompt that is too long for its response; raises if none of it is left."""
    prompt = prompt[max(0, len(prompt) + response_length - max_length) :]
    if not prompt:
        raise UntrainableRow(
            "too long",
            f"no prompt is left within data.max_length={max_length} tokens, because the response has "
            f"{response_length}; raise it",
        )
    return prompt


def response_text(value: Any) -> str:
    """Returns the text of a response, which is a string or a message, or a list that ends with one."""
    if isinstance(value, (list, tuple)) and value:
        value = value[-1]
    if isinstance(value, Mapping):
        value = _as_message(value)["content"]
    if not isinstance(value, str):
        raise PromptError(
            f"a response must be text or a message with text, got {short_repr(value)}"
        )
    return value


def _as_turns(value: Any) -> list[Message]:
    """Converts a list or array of turns to messages."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)) or not value:
        raise PromptError(f"a dialogue must be a non-empty list of turns, got {short_repr(value)}")
    return [_as_message(turn) for turn in value]


def _as_message(turn: object) -> Message:
    """Converts a turn with {role, content} or {from, value} to a message."""
    if not isinstance(turn, Mapping):
        raise PromptError(f"a turn must be an object with role and content, got {short_repr(turn)}")
    speaker = turn.get("from")
    if speaker is not None:
        role = _ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker
        turn = {"role": role, "content": turn.get("value")}
    return as_messages([dict(turn)])[0]


def split_dialogue(value: Any) -> tuple[list[Message], str]:
    """Splits a dialogue into the turns before the response, and the response.

    A dialogue is a list of messages, or text with "\\n\\nHuman:" and "\\n\\nAssistant:".
    """
    if not isinstance(value, str):
        messages = _as_turns(value)
    else:
        intro, *speakers_and_texts = _TURN_START.split(value)
        turns = zip(speakers_and_texts[::2], speakers_and_texts[1::2], strict=True)
        messages = [{"role": _ROLES[speaker], "content": text.strip()} for speaker, text in turns]
        if intro.strip() or not messages or messages[0]["role"] != "user":
            raise PromptError(
                "without a prompt, the text must be a dialogue that starts with Human:, got"
                f" {short_repr(value)}"
            )
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise PromptError("a dialogue without a prompt must end with the assistant's response")
    return messages[:-1], response_text(messages[-1])
