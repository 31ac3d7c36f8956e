"""Supervised datasets: token ids and the loss mask, which is 1 for the assistant's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hone.config.sft import SFTDataConfig
from hone.data.conversation import TokensAndMask, encode_conversation
from hone.data.encoded import EncodedDataset, EncodedRow, UntrainableRow, check_row_text
from hone.data.messages import (
    PromptError,
    Tools,
    as_messages,
    check_message_roles,
    remove_nulls,
)
from hone.data.prompts import truncate
from hone.text import BadText, find_flaw, read_json, short_repr
from hone.types import Row


class SFTDataset(EncodedDataset):
    """Single-turn rows; columns `prompt_key` and `response_key` have text or objects.

    `prompt_dict_keys` and `response_dict_keys` lead to the text in an object. `dataset[i]` is
    {"input_ids", "loss_mask"}, two lists of equal length, truncated to max_length.
    """

    config: SFTDataConfig

    def encode_untruncated(self, row: Row) -> TokensAndMask:
        """Returns ids and mask before truncation; the targets are the response and the end token."""
        prompt, response = self._prompt_and_response(row)
        prompt_ids, response_ids = self.render(prompt), self.tokenise(response)
        if self.tokenizer.eos_token_id is not None:
            response_ids.append(int(self.tokenizer.eos_token_id))
        return prompt_ids + response_ids, [0] * len(prompt_ids) + [1] * len(response_ids)

    def check(self, row: Row) -> None:
        """Raises PromptError if the row does not match the schema."""
        check_row_text(row, self.config.prompt_key, self.config.response_key)
        prompt, response = self._prompt_and_response(row)
        check_message_roles(as_messages(prompt))
        if not isinstance(response, str):
            kind = type(response).__name__
            raise PromptError(f"column {self.config.response_key!r} must be text, got {kind}")

    def _prompt_and_response(self, row: Row) -> tuple[Any, Any]:
        config = self.config
        return (
            look_up_field(row, config.prompt_key, config.prompt_dict_keys, "data.prompt_key"),
            look_up_field(row, config.response_key, config.response_dict_keys, "data.response_key"),
        )

    def encode_row(self, row: Row) -> EncodedRow:
        ids, mask = self.encode_untruncated(row)
        self.check_length(len(ids))
        length, truncation = self.max_length, self.truncation
        ids, mask = truncate(ids, length, truncation), truncate(mask, length, truncation)
        if 1 not in mask[1:]:  # the first token is never predicted
            raise UntrainableRow(
                "nothing to learn",
                f"no target token is left within data.max_length={length} tokens",
            )
        return {"input_ids": ids, "loss_mask": mask}


class MultiTurnSFTDataset(SFTDataset):
    """Rows with a conversation, and optional columns `tools_key` and `enable_thinking_key`."""

    def encode_untruncated(self, row: Row) -> TokensAndMask:
        multiturn = self.config.multiturn
        kwargs = dict(self.template_kwargs)
        if row.get(multiturn.enable_thinking_key) is not None:
            kwargs["enable_thinking"] = bool(row[multiturn.enable_thinking_key])
        return encode_conversation(
            as_messages(row[multiturn.messages_key]),
            self.tokenizer,
            tools=self._tools(row),
            template_kwargs=kwargs,
            ignore_mismatch=self.config.ignore_input_ids_mismatch,
            max_tokens=self.max_tokens,
        )

    def check(self, row: Row) -> None:
        key = self.config.multiturn.messages_key
        try:
            check_row_text(row, key)
            if isinstance(row.get(key), str):
                raise PromptError("it must be a list of messages, not text")
            messages = as_messages(row.get(key))
            check_message_roles(messages)
        except PromptError as error:
            raise PromptError(f"column {key!r}: {error}") from error
        if not any(message["role"] == "assistant" for message in messages):
            raise PromptError(f"column {key!r} has no assistant turn, so nothing to learn")
        self._tools(row)

    def _tools(self, row: Row) -> Tools | None:
        """Returns a row's tool schemas; the column has a list of objects, or the list as JSON text."""
        key = self.config.multiturn.tools_key
        tools: Any = row.get(key)
        if isinstance(tools, str):
            try:
                tools = read_json(tools) if tools.strip() else None
            except BadText as error:
                raise PromptError(f"column {key!r} is text that is not JSON: {error}") from error
            if flaw := find_flaw(tools):
                raise PromptError(f"column {key!r} {flaw}")
        elif tools is not None:
            tools = remove_nulls(tools.tolist() if hasattr(tools, "tolist") else tools)
        is_list = isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)
        if tools is not None and not is_list:
            raise PromptError(f"column {key!r} must be a list of tool schemas, got {tools!r:.100}")
        return tools


def look_up_field(row: Row, key: str, dict_keys: Sequence[str] | None, config_key: str) -> Any:
    """Returns column `key` of a row, or the nested field that the path `dict_keys` names."""
    if row.get(key) is None:
        raise PromptError(
            f"column {key!r} ({config_key}) is missing or empty; the row has "
            f"{', '.join(map(str, row))}"
        )
    value = row[key]
    for name in dict_keys or ():
        if not isinstance(value, Mapping) or value.get(name) is None:
            fields = ", ".join(map(str, value)) if isinstance(value, Mapping) else short_repr(value)
            raise PromptError(
                f"column {key!r} has no {name!r} ({config_key.removesuffix('_key')}_dict_keys); it "
                f"has {fields}"
            )
        value = value[name]
    return value
