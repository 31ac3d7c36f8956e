"""Pairs of a preferred and a rejected response to one prompt, for reward models.

Both sequences are encoded as the policy's prompt, then the response and the end token, the tokens that
`RewardModelWorker` reads in RL; the model is scored at the last one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hone.config.sft import PairDataConfig
from hone.data.encoded import EncodedDataset, EncodedRow, Unlearnable, refuse_hostile_text
from hone.data.prompts import (
    Message,
    PromptError,
    as_messages,
    refuse_unknown_roles,
    render_prompt,
    tokenise,
)
from hone.text import shown
from hone.types import Row

_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant", "human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class Pair:
    """A prompt with a better and a worse response."""

    prompt: str | list[Message]
    chosen: str
    rejected: str
    margin: float = 0.0

    @property
    def opening(self) -> str:
        """The first user turn; pairs that share it belong to one fold of a cross-validation."""
        if isinstance(self.prompt, str):
            return self.prompt
        return next((str(m["content"]) for m in self.prompt if m["role"] == "user"), "")


class PairDataset(EncodedDataset):
    """Rows of `prompt`, `chosen` and `rejected`, or of two whole dialogues.

    `dataset[i]` is {"input_ids", "rejected_ids", "prompt_tokens", "margin"}; the last two hold one number.
    """

    config: PairDataConfig

    def pair(self, row: Row) -> Pair:
        """Returns the pair of a row; raises PromptError if the row is none."""
        config = self.config
        chosen, rejected = row.get(config.chosen_key), row.get(config.rejected_key)
        for key, value in ((config.chosen_key, chosen), (config.rejected_key, rejected)):
            if value is None:
                columns = ", ".join(map(str, row))
                raise PromptError(f"column {key!r} is missing or empty; the row has {columns}")
        prompt = row.get(config.prompt_key)
        if prompt is None and row.get("conversations") is not None:
            prompt = [_sharegpt(turn) for turn in row["conversations"]]
        if prompt is None:
            (prompt, better), (before, worse) = _dialogue(chosen), _dialogue(rejected)
            if prompt != before:
                raise PromptError("the two dialogues differ before their last turn")
        else:
            better, worse = _response(chosen), _response(rejected)
            prompt = prompt if isinstance(prompt, str) else as_messages(prompt)
        margin = row.get(config.margin_key)
        if margin is not None and (isinstance(margin, bool) or not _is_number(margin)):
            raise PromptError(f"column {config.margin_key!r} is a number, got {shown(margin)}")
        return Pair(prompt, better, worse, float(margin or 0.0))

    def check(self, row: Row) -> None:
        refuse_hostile_text(row)
        pair = self.pair(row)
        refuse_unknown_roles(as_messages(pair.prompt))
        if not pair.chosen.strip() or not pair.rejected.strip():
            raise Unlearnable("empty response", "a response of the pair is empty")
        if pair.chosen.strip() == pair.rejected.strip():
            raise Unlearnable("tie", "the two responses of the pair are the same")
        if self.config.drop_duplicates:
            self._refuse_repeated(pair)

    def _refuse_repeated(self, pair: Pair) -> None:
        earlier: set[tuple[str, str, str]] = self.__dict__.setdefault("_earlier", set())
        key = (str(pair.prompt), pair.chosen.strip(), pair.rejected.strip())
        if key in earlier:
            raise Unlearnable("duplicate", "an earlier row has the same pair")
        if (key[0], key[2], key[1]) in earlier:
            raise Unlearnable("contradiction", "an earlier row has the pair in the opposite order")
        earlier.add(key)

    def encoded(self, row: Row) -> EncodedRow:
        pair = self.pair(row)
        prompt = render_prompt(
            pair.prompt,
            self.tokenizer,
            self.config.prompt_format,
            template_kwargs=self.template_kwargs,
            max_tokens=self.max_tokens,
        )
        eos = self.tokenizer.eos_token_id
        end = [] if eos is None else [int(eos)]
        chosen, rejected = (
            tokenise(text, self.tokenizer, self.max_tokens) + end
            for text in (pair.chosen, pair.rejected)
        )
        longest = max(len(chosen), len(rejected))
        self.refuse_too_long(len(prompt) + longest)
        prompt = prompt[max(0, len(prompt) + longest - self.max_length) :]
        if not prompt or not chosen or not rejected:
            raise Unlearnable(
                "too long", f"no prompt is left within data.max_length={self.max_length} tokens"
            )
        return {
            "input_ids": prompt + chosen,
            "rejected_ids": prompt + rejected,
            "prompt_tokens": [len(prompt)],
            "margin": [pair.margin],
        }


def _response(value: Any) -> str:
    """Returns the text of a response: text, one message, or a list that ends with one."""
    if isinstance(value, (list, tuple)) and value:
        value = value[-1]
    if isinstance(value, Mapping):
        value = _sharegpt(value)["content"]
    if not isinstance(value, str):
        raise PromptError(f"a response is text or a message with text, got {shown(value)}")
    return value


def _sharegpt(turn: object) -> Message:
    """Returns a message of {role, content} or {from, value}."""
    if not isinstance(turn, Mapping):
        raise PromptError(f"a turn is an object with role and content, got {shown(turn)}")
    if "from" not in turn:
        return as_messages([dict(turn)])[0]
    return {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn.get("value")}


def _dialogue(value: Any) -> tuple[list[Message], str]:
    """Splits a dialogue into the turns before the last and the text of the last, which is the response.

    A dialogue is a list of messages, or text with "\\n\\nHuman:" and "\\n\\nAssistant:" before its turns.
    """
    if not isinstance(value, str):
        messages = [_sharegpt(turn) for turn in as_messages(value)]
    else:
        before, *parts = _TURN.split(value)
        pairs = zip(parts[::2], parts[1::2], strict=True)
        messages = [{"role": _ROLES[who], "content": text.strip()} for who, text in pairs]
        if before.strip() or not messages or messages[0]["role"] != "user":
            raise PromptError(
                f"there is no prompt, and the text is no dialogue that begins with Human: {shown(value)}"
            )
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise PromptError("a dialogue without a prompt ends with the assistant's response")
    return messages[:-1], _response(messages[-1])


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
