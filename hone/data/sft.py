"""Supervised rows: token ids and the mask that says which of them are learnt.

`loss_mask[i] == 1` means that token i is a target; only what the assistant wrote is.
Leaves out conversations (conversation.py), and padding: rows are lists, the engine packs them.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

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
from hone.data.rows import BadRows, DataError, Files, RowStore, read_rows
from hone.data.schema import text_problem
from hone.text import BadText, flaw_of, read_json, shown
from hone.tokenizer import Tokenizer
from hone.types import Row, Settings

THREADS = 4
"""Tokenizers let go of Python's lock, so that threads share their work."""
BLOCK_ROWS = 256
KEPT_TOKENS = 100_000_000
"""Encoded rows kept in memory, at 5 bytes a token; those beyond are encoded again at their turn."""


class Unlearnable(PromptError):
    """A row that can be rendered, but not be trained on; `reason` is what it is counted under."""

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
    """A prompt as rollout renders it, then the response and the end token, both learnt."""
    prompt_ids = render_prompt(
        prompt,
        tokenizer,
        prompt_format,
        template_kwargs=template_kwargs,
        max_tokens=max_tokens,
    )
    response_ids = tokenise(response, tokenizer, max_tokens)
    if tokenizer.eos_token_id is not None:
        response_ids.append(int(tokenizer.eos_token_id))
    return prompt_ids + response_ids, [0] * len(prompt_ids) + [1] * len(response_ids)


class _Packed(NamedTuple):
    """An encoded row in a tenth of the memory its lists would take."""

    ids: array[int]
    mask: bytes


class SFTDataset:
    """Single-turn rows: `prompt_key` and `response_key`, each perhaps an object to look into.

    `dataset[i]` is {"input_ids", "loss_mask"}, lists of one length, cut to max_length.
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
        if rows is not None:
            self._rows: Sequence[Row] | RowStore = rows
        elif parquet_files is not None:
            self._rows = read_rows(parquet_files, self.bad_rows)
        else:
            raise DataError("no data files were named; set data.train_files")
        self.template_kwargs = dict(config.apply_chat_template_kwargs)
        if config.chat_template is not None:
            self.template_kwargs["chat_template"] = config.chat_template
        self.positions = self._sampled(self._usable_positions(), max_samples)
        self._kept: dict[int, _Packed] = {}
        self._kept_tokens = 0

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        position = self.positions[index]
        if position in self._kept:
            ids, mask = self._kept[position]
            return {"input_ids": ids.tolist(), "loss_mask": list(mask)}
        try:
            return self._encoded(position)
        except PromptError as error:
            raise DataError(f"{self.where(position)}: {error}") from error

    def encode_all(self, on_rows: Callable[[int], None] | None = None) -> None:
        """Encode every row now: a bad one stops the run, or is skipped, before the first step.

        `on_rows` hears how many more are done. What was encoded is kept for its turn.
        """
        good: list[int] = []
        self._tried(self.positions[0])  # alone: a tokenizer may settle its options at its first use
        with ThreadPoolExecutor(THREADS, thread_name_prefix="encode rows") as threads:
            for start in range(0, len(self.positions), BLOCK_ROWS):
                block = self.positions[start : start + BLOCK_ROWS]
                for position, outcome in zip(block, threads.map(self._tried, block), strict=True):
                    if isinstance(outcome, PromptError):
                        reason = getattr(outcome, "reason", "cannot be rendered")
                        self.bad_rows.report(reason, f"{self.where(position)}: {outcome}")
                        continue
                    good.append(position)
                    self._keep(position, outcome)
                if on_rows is not None:
                    on_rows(len(block))
        self.positions = self._some(good)

    def key(self, index: int) -> tuple[str, int]:
        """(data set name, row number), for the loader's uid."""
        position = self.positions[index]
        return self._rows.key(position) if hasattr(self._rows, "key") else ("rows", position)

    @property
    def fingerprint(self) -> str | None:
        """Names the files' content and which of their rows are used; None for rows in memory."""
        if not hasattr(self._rows, "fingerprint"):
            return None
        used = array("q", self.positions).tobytes()
        return hashlib.blake2b(self._rows.fingerprint.encode() + used, digest_size=16).hexdigest()

    @property
    def max_tokens(self) -> int | None:
        """Tokens of a row, where a longer one is refused and not cut."""
        return self.config.max_length if self.config.truncation == "error" else None

    def where(self, position: int) -> str:
        return self._rows.where(position) if hasattr(self._rows, "where") else f"row {position}"

    def encode(self, row: Row) -> Encoded:
        """Token ids and mask of one row, not yet cut."""
        config = self.config
        return encode_single_turn(
            looked_up(row, config.prompt_key, config.prompt_dict_keys, "data.prompt_key"),
            looked_up(row, config.response_key, config.response_dict_keys, "data.response_key"),
            self.tokenizer,
            self.config.prompt_format,
            self.template_kwargs,
            self.max_tokens,
        )

    def problem(self, row: Row) -> str | None:
        """Why the row cannot be learnt from, or None."""
        config = self.config
        try:
            refuse_hostile_text(row, self.config.prompt_key, self.config.response_key)
            prompt = looked_up(row, config.prompt_key, config.prompt_dict_keys, "data.prompt_key")
            response = looked_up(
                row, config.response_key, config.response_dict_keys, "data.response_key"
            )
            refuse_unknown_roles(as_messages(prompt))
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
                self.bad_rows.report("not in the schema", f"{self.where(position)}: {problem}")
        return self._some(usable)

    def _some(self, positions: list[int]) -> list[int]:
        if not positions:
            raise DataError(f"no good row is left: {'; '.join(self.bad_rows.examples)}")
        return positions

    def _sampled(self, positions: list[int], max_samples: int) -> list[int]:
        if not 0 < max_samples < len(positions):
            return positions
        if not self.config.shuffle:
            return positions[:max_samples]
        drawn = random.Random(f"max_samples:{self.config.seed}").sample(positions, max_samples)
        return sorted(drawn)

    def _encoded(self, position: int) -> dict[str, list[int]]:
        return self._cut(*self.encode(self._rows[position]))

    def _tried(self, position: int) -> dict[str, list[int]] | PromptError:
        try:
            return self._encoded(position)
        except PromptError as error:
            return error

    def _keep(self, position: int, row: Mapping[str, list[int]]) -> None:
        self._kept_tokens += len(row["input_ids"])
        if self._kept_tokens <= KEPT_TOKENS:
            self._kept[position] = _Packed(array("i", row["input_ids"]), bytes(row["loss_mask"]))

    def _cut(self, ids: list[int], mask: list[int]) -> dict[str, list[int]]:
        if len(ids) > self.config.max_length and self.config.truncation == "error":
            raise Unlearnable(
                "too long",
                f"the row has {len(ids)} tokens, data.max_length={self.config.max_length}; raise"
                " it, or set data.truncation=left|right",
            )
        length, how = self.config.max_length, self.config.truncation
        ids, mask = truncate(ids, length, how), truncate(mask, length, how)
        if 1 not in mask[1:]:  # the first token has nothing before it to be predicted from
            raise Unlearnable(
                "nothing to learn",
                f"nothing to learn is left within data.max_length={length} tokens",
            )
        return {"input_ids": ids, "loss_mask": mask}


class MultiTurnSFTDataset(SFTDataset):
    """Conversations: `messages_key`, and `tools_key`, `enable_thinking_key` where a row has them."""

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

    def problem(self, row: Row) -> str | None:
        key = self.config.multiturn.messages_key
        try:
            refuse_hostile_text(row, key)
            messages = as_messages(row.get(key))
            refuse_unknown_roles(messages)
        except PromptError as error:
            return f"column {key!r}: {error}"
        if not any(message["role"] == "assistant" for message in messages):
            return f"column {key!r} has no assistant turn, so nothing to learn"
        try:
            self._tools(row)
        except PromptError as error:
            return str(error)
        return None

    def _tools(self, row: Row) -> Tools | None:
        """The row's tool schemas: a list of objects, or JSON text of one."""
        key = self.config.multiturn.tools_key
        tools: Any = row.get(key)
        if isinstance(tools, str):
            try:
                tools = read_json(tools) if tools.strip() else None
            except BadText as error:
                raise PromptError(f"column {key!r} is text that is not JSON: {error}") from error
            if flaw := flaw_of(tools):
                raise PromptError(f"column {key!r} {flaw}")
        else:
            tools = without_nulls(
                tools if tools is None or isinstance(tools, list) else tools.tolist()
            )
        if tools is None:
            return None
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise PromptError(f"column {key!r} holds a list of tool schemas, got {tools!r:.100}")
        return tools


def refuse_hostile_text(row: Row, *columns: str) -> None:
    """Text that is no Unicode, or a NUL in what is learnt, is a bad row."""
    problem = text_problem(row, columns)
    if problem is not None:
        raise PromptError(str(problem))


def looked_up(row: Row, key: str, dict_keys: Sequence[str] | None, setting: str) -> Any:
    """Column `key`, then the named fields inside it; `setting` is the key that names the column."""
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
