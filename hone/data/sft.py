"""Supervised rows: token ids and the mask that says which of them are learnt.

`loss_mask[i] == 1` means that token i is a target; only what the assistant wrote is.
Leaves out padding and packing: rows are lists, the engine packs them.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping, Sequence
from typing import Any

from hone.config.sft import SFTDataConfig
from hone.data.prompts import Message, PromptError, as_messages, render_prompt, truncate
from hone.data.rows import BadRows, DataError, Row, read_rows

Encoded = tuple[list[int], list[int]]  # (input_ids, loss_mask), one length


def encode_single_turn(
    prompt: Any,
    response: str,
    tokenizer: Any,
    prompt_format: str,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Encoded:
    """A prompt as rollout renders it, then the response and the end token, both learnt."""
    prompt_ids = render_prompt(prompt, tokenizer, prompt_format, template_kwargs=template_kwargs)
    response_ids = [int(token) for token in tokenizer.encode(response, add_special_tokens=False)]
    if tokenizer.eos_token_id is not None:
        response_ids.append(int(tokenizer.eos_token_id))
    return prompt_ids + response_ids, [0] * len(prompt_ids) + [1] * len(response_ids)


def encode_conversation(
    messages: Sequence[Message],
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    ignore_mismatch: bool = False,
) -> Encoded:
    """A conversation turn by turn: what the assistant wrote, with its end token, is learnt.

    A template that rewrites earlier turns (drops their thinking, say) makes the turns differ from
    the whole; that is an error unless `ignore_mismatch`, which then joins the turns as written.
    """
    template = _Template(tokenizer, tools, template_kwargs)
    ids: list[int] = []
    mask: list[int] = []
    for number, message in enumerate(messages):
        if message["role"] == "system" and number + 1 < len(messages):
            continue  # some templates refuse a system message alone; it comes with the next turn
        context = list(messages[:number])
        shown = template.render([*context, message])
        start = len(ids)
        if shown[:start] != ids:
            if not ignore_mismatch:
                raise PromptError(
                    f"the chat template renders turns 1 to {number} otherwise once turn"
                    f" {number + 1} follows (earlier thinking dropped?); split the conversation"
                    " into one row a turn, or set data.ignore_input_ids_mismatch=true to learn the"
                    " turns as written"
                )
            context = _stand_in_context(message)
            shown = template.render([*context, message])
            start = len(template.render(context))
        segment_mask = [0] * (len(shown) - start)
        if message["role"] == "assistant":
            begin = template.header_end(context, shown, start)
            end = _end_of_turn(shown, begin, tokenizer.eos_token_id)
            segment_mask[begin - start : end - start] = [1] * (end - begin)
        ids += shown[start:]
        mask += segment_mask
    return ids, mask


class _Template:
    """The tokenizer's chat template with the options of the run."""

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.tools = tools
        self.kwargs = dict(template_kwargs or {})

    def render(self, messages: Sequence[Message], open_turn: bool = False) -> list[int]:
        if not messages:
            return []
        return render_prompt(
            list(messages),
            self.tokenizer,
            tools=self.tools,
            template_kwargs={**self.kwargs, "add_generation_prompt": open_turn},
        )

    def header_end(self, context: Sequence[Message], shown: list[int], start: int) -> int:
        """Where the assistant's own tokens begin: after what opens its turn at generation."""
        if not context:
            return start
        opened = self.render(context, open_turn=True)
        end = start
        while end < min(len(opened), len(shown)) and opened[end] == shown[end]:
            end += 1
        return end


def _end_of_turn(shown: Sequence[int], begin: int, eos: int | None) -> int:
    """One past the assistant's end token; the template's glue after it is not learnt."""
    for position in range(len(shown) - 1, begin - 1, -1):
        if shown[position] == eos:
            return position + 1
    return len(shown)


def _stand_in_context(message: Message) -> list[Message]:
    """A short conversation after which the message may stand, to render it by itself."""
    user = {"role": "user", "content": "-"}
    if message["role"] == "assistant":
        return [user]
    return [user, {"role": "assistant", "content": "-"}]


class SFTDataset:
    """Single-turn rows: `prompt_key` and `response_key`, each perhaps an object to look into.

    `dataset[i]` is {"input_ids", "loss_mask"}, lists of one length, cut to max_length.
    """

    def __init__(
        self,
        parquet_files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
        tokenizer: Any,
        config: SFTDataConfig,
        max_samples: int = -1,
        *,
        rows: Sequence[Row] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.bad_rows = BadRows(config.on_bad_row)
        self._rows: Any = rows
        if rows is None:
            if parquet_files is None:
                raise DataError("no data files were named; set data.train_files")
            self._rows = read_rows(parquet_files, self.bad_rows)
        self.template_kwargs = dict(config.apply_chat_template_kwargs)
        if config.chat_template is not None:
            self.template_kwargs["chat_template"] = config.chat_template
        self.positions = self._sampled(self._usable_positions(), max_samples)

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        position = self.positions[index]
        try:
            ids, mask = self.encode(self._rows[position])
            return self._cut(ids, mask)
        except PromptError as error:
            raise DataError(f"{self.where(position)}: {error}") from error

    def key(self, index: int) -> tuple[str, int]:
        """(data set name, row number), for the loader's uid."""
        position = self.positions[index]
        return self._rows.key(position) if hasattr(self._rows, "key") else ("rows", position)

    def where(self, position: int) -> str:
        return self._rows.where(position) if hasattr(self._rows, "where") else f"row {position}"

    def encode(self, row: Row) -> Encoded:
        """Token ids and mask of one row, not yet cut."""
        return encode_single_turn(
            looked_up(row, self.config.prompt_key, self.config.prompt_dict_keys),
            looked_up(row, self.config.response_key, self.config.response_dict_keys),
            self.tokenizer,
            self.config.prompt_format,
            self.template_kwargs,
        )

    def problem(self, row: Row) -> str | None:
        """Why the row cannot be learnt from, or None."""
        try:
            prompt = looked_up(row, self.config.prompt_key, self.config.prompt_dict_keys)
            response = looked_up(row, self.config.response_key, self.config.response_dict_keys)
            as_messages(prompt)
        except PromptError as error:
            return str(error)
        if not isinstance(response, str):
            return f"column {self.config.response_key!r} is text, got {type(response).__name__}"
        return None

    def _usable_positions(self) -> list[int]:
        usable = []
        rows = self._rows.scan() if hasattr(self._rows, "scan") else self._rows
        for position, row in enumerate(rows):
            problem = self.problem(row)
            if problem is None:
                usable.append(position)
            else:
                self.bad_rows.report("bad row", f"{self.where(position)}: {problem}")
        if not usable:
            raise DataError(f"no good row is left: {'; '.join(self.bad_rows.examples)}")
        return usable

    def _sampled(self, positions: list[int], max_samples: int) -> list[int]:
        if not 0 < max_samples < len(positions):
            return positions
        if not self.config.shuffle:
            return positions[:max_samples]
        drawn = random.Random(f"max_samples:{self.config.seed}").sample(positions, max_samples)
        return sorted(drawn)

    def _cut(self, ids: list[int], mask: list[int]) -> dict[str, list[int]]:
        if len(ids) > self.config.max_length and self.config.truncation == "error":
            raise PromptError(
                f"the row has {len(ids)} tokens, data.max_length={self.config.max_length}; raise"
                " it, or set data.truncation=left|right"
            )
        length, how = self.config.max_length, self.config.truncation
        ids, mask = truncate(ids, length, how), truncate(mask, length, how)
        if 1 not in mask[1:]:  # the first token has nothing before it to be predicted from
            raise PromptError(f"nothing to learn is left within data.max_length={length} tokens")
        return {"input_ids": ids, "loss_mask": mask}


class MultiTurnSFTDataset(SFTDataset):
    """Conversations: `messages_key`, and `tools_key`, `enable_thinking_key` where a row has them."""

    def encode(self, row: Row) -> Encoded:
        keys = self.config.multiturn
        tools = row.get(keys.tools_key)
        if isinstance(tools, str):
            tools = json.loads(tools)
        kwargs = dict(self.template_kwargs)
        if row.get(keys.enable_thinking_key) is not None:
            kwargs["enable_thinking"] = bool(row[keys.enable_thinking_key])
        return encode_conversation(
            as_messages(row[keys.messages_key]),
            self.tokenizer,
            tools=tools,
            template_kwargs=kwargs,
            ignore_mismatch=self.config.ignore_input_ids_mismatch,
        )

    def problem(self, row: Row) -> str | None:
        key = self.config.multiturn.messages_key
        try:
            messages = as_messages(row.get(key))
        except PromptError as error:
            return f"column {key!r}: {error}"
        if not any(message["role"] == "assistant" for message in messages):
            return f"column {key!r} has no assistant turn, so nothing to learn"
        return None


def looked_up(row: Row, key: str, dict_keys: Sequence[str] | None) -> Any:
    """Column `key`, then the named fields inside it."""
    value: Any = row
    for name in (key, *(dict_keys or ())):
        if not isinstance(value, Mapping) or value.get(name) is None:
            raise PromptError(f"no {name!r} in the row; it has {', '.join(map(str, row))}")
        value = value[name]
    return value
