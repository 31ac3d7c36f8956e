"""Supervised datasets: token ids and the loss mask, which is 1 for the assistant's tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hone.config.sft import SFTDataConfig
from hone.data.conversation import Encoded, encode_conversation
from hone.data.prompts import (
    Prompt,
    PromptError,
    Tools,
    as_messages,
    refuse_unknown_roles,
    render_prompt,
    tokenise,
    truncate,
    without_nulls,
)
from hone.data.rows import (
    BadRows,
    DataError,
    Files,
    positions_fingerprint,
    read_rows,
    sample_positions,
)
from hone.data.schema import text_problem
from hone.text import BadText, flaw_of, read_json, shown
from hone.tokenizer import Tokenizer
from hone.types import Row, Settings

THREADS = 4
"""Tokenizers release the GIL, so threads run in parallel."""
BLOCK_ROWS = 256
CACHED_TOKENS = 100_000_000
"""Encoded tokens cached in memory, 5 bytes each; further rows are encoded again when they are read."""


class Unlearnable(PromptError):
    """Raised for a row that can be rendered but not trained on; it is counted under `reason`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def encode_single_turn(
    prompt: Prompt,
    response: str,
    tokenizer: Tokenizer,
    prompt_format: str,
    template_kwargs: Settings | None = None,
    max_tokens: int | None = None,
) -> Encoded:
    """Encodes the prompt as rollout renders it, then the response and the end token as targets."""
    prompt_ids = render_prompt(
        prompt, tokenizer, prompt_format, template_kwargs=template_kwargs, max_tokens=max_tokens
    )
    response_ids = tokenise(response, tokenizer, max_tokens)
    if tokenizer.eos_token_id is not None:
        response_ids.append(int(tokenizer.eos_token_id))
    return prompt_ids + response_ids, [0] * len(prompt_ids) + [1] * len(response_ids)


class SFTDataset:
    """Single-turn rows: `prompt_key` and `response_key` name text columns or objects that contain the text.

    `dataset[i]` is {"input_ids", "loss_mask"}, two lists of equal length, truncated to max_length.
    """

    def __init__(
        self,
        parquet_files: Files | None,
        tokenizer: Tokenizer,
        config: SFTDataConfig,
        max_samples: int = -1,
        *,
        rows: Sequence[Row] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.bad_rows = BadRows(config.on_bad_row)
        self.store = read_rows(parquet_files or () if rows is None else rows, self.bad_rows)
        self.template_kwargs = dict(config.apply_chat_template_kwargs)
        if config.chat_template is not None:
            self.template_kwargs["chat_template"] = config.chat_template
        self.max_tokens = config.max_length if config.truncation == "error" else None
        """Token limit of a row if longer rows are rejected; None if they are truncated."""
        usable = []
        for position, row in enumerate(self.store.scan()):
            try:
                self.check(row)
                usable.append(position)
            except PromptError as error:
                self._report(position, "not in the schema", error)
        shuffle, seed = config.shuffle, config.seed
        self.positions = sample_positions(
            self._any(usable), max_samples, shuffle=shuffle, seed=seed
        )
        self._cache: dict[int, tuple[array[int], bytes]] = {}

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        position = self.positions[index]
        if position in self._cache:
            ids, mask = self._cache[position]
            return {"input_ids": ids.tolist(), "loss_mask": list(mask)}
        row = self._encode_position(position)
        if isinstance(row, PromptError):
            raise DataError(f"{self.store.where(position)}: {row}") from row
        return row

    def encode_all(self, on_rows: Callable[[int], None] | None = None) -> None:
        """Encodes all rows now, so that a bad one stops the run, or is skipped, before the first step."""
        good: list[int] = []
        cached_tokens = 0
        # The first row is encoded alone, because a tokenizer may set its options on first use.
        self._encode_position(self.positions[0])
        with ThreadPoolExecutor(THREADS, thread_name_prefix="encode rows") as threads:
            for start in range(0, len(self.positions), BLOCK_ROWS):
                block = self.positions[start : start + BLOCK_ROWS]
                for position, row in zip(
                    block, threads.map(self._encode_position, block), strict=True
                ):
                    if isinstance(row, PromptError):
                        self._report(position, getattr(row, "reason", "cannot be rendered"), row)
                        continue
                    good.append(position)
                    ids, mask = row["input_ids"], row["loss_mask"]
                    cached_tokens += len(ids)
                    if cached_tokens <= CACHED_TOKENS:
                        self._cache[position] = array("i", ids), bytes(mask)
                if on_rows is not None:
                    on_rows(len(block))
        self.positions = self._any(good)

    def key(self, index: int) -> tuple[str, int]:
        """Returns (dataset name, row number) for the loader's uid."""
        return self.store.key(self.positions[index])

    @property
    def fingerprint(self) -> str:
        """Hash of the content and of the rows in use."""
        return positions_fingerprint(self.store, self.positions)

    def encode(self, row: Row) -> Encoded:
        """Returns token ids and mask of one row before truncation."""
        prompt, response = self._texts(row)
        return encode_single_turn(
            prompt,
            response,
            self.tokenizer,
            self.config.prompt_format,
            self.template_kwargs,
            self.max_tokens,
        )

    def check(self, row: Row) -> None:
        """Raises PromptError if the row does not match the schema."""
        _refuse_hostile_text(row, self.config.prompt_key, self.config.response_key)
        prompt, response = self._texts(row)
        refuse_unknown_roles(as_messages(prompt))
        if not isinstance(response, str):
            kind = type(response).__name__
            raise PromptError(f"column {self.config.response_key!r} is text, got {kind}")

    def _texts(self, row: Row) -> tuple[Any, Any]:
        config = self.config
        return (
            _look_up(row, config.prompt_key, config.prompt_dict_keys, "data.prompt_key"),
            _look_up(row, config.response_key, config.response_dict_keys, "data.response_key"),
        )

    def _report(self, position: int, reason: str, error: PromptError) -> None:
        self.bad_rows.report(reason, f"{self.store.where(position)}: {error}")

    def _any(self, positions: list[int]) -> list[int]:
        if not positions:
            raise DataError(f"no good row is left: {'; '.join(self.bad_rows.examples)}")
        return positions

    def _encode_position(self, position: int) -> dict[str, list[int]] | PromptError:
        length, how = self.config.max_length, self.config.truncation
        try:
            ids, mask = self.encode(self.store[position])
            if len(ids) > length and how == "error":
                raise Unlearnable(
                    "too long",
                    f"the row has {len(ids)} tokens, data.max_length={length}; raise it, or set"
                    " data.truncation=left|right",
                )
            ids, mask = truncate(ids, length, how), truncate(mask, length, how)
        except PromptError as error:
            return error
        if 1 not in mask[1:]:  # the first token cannot be predicted: no token precedes it
            return Unlearnable(
                "nothing to learn",
                f"nothing to learn is left within data.max_length={length} tokens",
            )
        return {"input_ids": ids, "loss_mask": mask}


class MultiTurnSFTDataset(SFTDataset):
    """Conversations in `messages_key`, with optional columns `tools_key` and `enable_thinking_key`."""

    def encode(self, row: Row) -> Encoded:
        keys = self.config.multiturn
        kwargs = dict(self.template_kwargs)
        if row.get(keys.enable_thinking_key) is not None:
            kwargs["enable_thinking"] = bool(row[keys.enable_thinking_key])
        return encode_conversation(
            as_messages(row[keys.messages_key]),
            self.tokenizer,
            tools=self._tools(row),
            template_kwargs=kwargs,
            ignore_mismatch=self.config.ignore_input_ids_mismatch,
            max_tokens=self.max_tokens,
        )

    def check(self, row: Row) -> None:
        key = self.config.multiturn.messages_key
        try:
            _refuse_hostile_text(row, key)
            messages = as_messages(row.get(key))
            refuse_unknown_roles(messages)
        except PromptError as error:
            raise PromptError(f"column {key!r}: {error}") from error
        if not any(message["role"] == "assistant" for message in messages):
            raise PromptError(f"column {key!r} has no assistant turn, so nothing to learn")
        self._tools(row)

    def _tools(self, row: Row) -> Tools | None:
        """Returns the row's tool schemas, which are a list of objects or its JSON text."""
        key = self.config.multiturn.tools_key
        tools: Any = row.get(key)
        if isinstance(tools, str):
            try:
                tools = read_json(tools) if tools.strip() else None
            except BadText as error:
                raise PromptError(f"column {key!r} is text that is not JSON: {error}") from error
            if flaw := flaw_of(tools):
                raise PromptError(f"column {key!r} {flaw}")
        elif tools is not None:
            tools = without_nulls(tools if isinstance(tools, list) else tools.tolist())
        is_list = isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)
        if tools is not None and not is_list:
            raise PromptError(f"column {key!r} holds a list of tool schemas, got {tools!r:.100}")
        return tools


def _refuse_hostile_text(row: Row, *columns: str) -> None:
    """Raises PromptError for invalid Unicode, and for NUL in the given columns."""
    problem = text_problem(row, columns)
    if problem is not None:
        raise PromptError(str(problem))


def _look_up(row: Row, key: str, dict_keys: Sequence[str] | None, setting: str) -> Any:
    """Returns column `key`, or a nested field of it; `setting` is the config key of the column."""
    if row.get(key) is None:
        raise PromptError(
            f"column {key!r} ({setting}) is missing or empty; the row has {', '.join(map(str, row))}"
        )
    value = row[key]
    for name in dict_keys or ():
        if not isinstance(value, Mapping) or value.get(name) is None:
            inside = ", ".join(map(str, value)) if isinstance(value, Mapping) else shown(value)
            raise PromptError(
                f"column {key!r} has no {name!r} ({setting.removesuffix('_key')}_dict_keys); it has "
                f"{inside}"
            )
        value = value[name]
    return value
