"""`hone data show FILE`: formats rows as the model sees them, with special tokens."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from hone.config.data import DataConfig
from hone.config.sft import SFTDataConfig
from hone.data.check import MESSAGES_COLUMN, FileKind, kind_of_file
from hone.data.messages import Prompt, PromptError, Tools, as_messages
from hone.data.prompt_ids import render_prompt
from hone.data.reading import read_file
from hone.data.rows import BadRowPolicy, DataError
from hone.data.sft import MultiTurnSFTDataset, SFTDataset
from hone.text import short_repr
from hone.tokenizer import Tokenizer
from hone.types import JsonValue, Row

_MAX_VALUE_CHARACTERS = 300  # maximum characters of a value outside the prompt and the targets


def parse_row_numbers(text: str, count: int) -> list[int]:
    """Parses row numbers such as `0,3-5`; raises DataError for a number outside the file."""
    numbers: list[int] = []
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not match:
            raise DataError(f"--rows {text}: write numbers and ranges, as in 0,3-5")
        first, last = int(match[1]), int(match[2] or match[1])
        if last >= count:
            bad_row = max(first, count)
            raise DataError(f"--rows {text}: the file has rows 0 to {count - 1}, not {bad_row}")
        numbers += range(first, last + 1)
    return numbers


def show_file(
    path: str | os.PathLike[str],
    *,
    rows: str | None = None,
    tokenizer: Tokenizer | None = None,
    config: DataConfig | None = None,
    tools: Tools | None = None,
) -> str:
    """Formats each selected row as a block of lines; `tools` are schemas for the chat template."""
    file = read_file(path, BadRowPolicy("raise", policy_key=None), "the file name")
    assert file is not None  # read_file raises for an unreadable or empty file
    kind = kind_of_file(file[0], config or DataConfig())
    numbers = parse_row_numbers(rows or f"0-{min(2, len(file) - 1)}", len(file))
    blocks = []
    for number in numbers:
        row = file[number]
        try:
            format_row = _supervised_lines if kind.is_supervised else _prompt_lines
            lines = [*format_row(row, kind, tokenizer, tools)]
        except (PromptError, DataError) as error:
            lines = [f"cannot be shown: {error}"]
        blocks.append("\n".join([f"== {file.where(number)}", *lines]))
    return "\n\n".join(blocks)


def _prompt_lines(
    row: Row, kind: FileKind, tokenizer: Tokenizer | None, tools: Tools | None
) -> Iterator[str]:
    config = kind.config
    key = config.prompt_key
    if row.get(key) is None:
        raise PromptError(
            f"column {key!r} (--prompt-key) is missing; the row has {', '.join(map(str, row))}"
        )
    if tokenizer is None:
        yield from _message_lines(row[key])
    else:
        options = config.apply_chat_template_kwargs
        ids = render_prompt(row[key], tokenizer, config.prompt_format, tools, options)
        limit = config.max_prompt_length
        excess = f", more than the {limit:,} that fit" if len(ids) > limit else ""
        yield f"prompt, {len(ids):,} tokens{excess}:"
        yield _indent(tokenizer.decode(ids, skip_special_tokens=False))
    reward_model = row.get("reward_model") or {}
    if isinstance(reward_model, Mapping):
        yield f"ground truth: {format_value(reward_model.get('ground_truth'))}"
    yield from _other_columns(row, key, "reward_model")


def _supervised_lines(
    row: Row, kind: FileKind, tokenizer: Tokenizer | None, tools: Tools | None
) -> Iterator[str]:
    """Yields the decoded tokens; the lines of target tokens have the prefix `learnt`."""
    key, response_key = kind.config.prompt_key, kind.response_key
    if tokenizer is None or (key != MESSAGES_COLUMN and response_key is None):
        if row.get(key) is not None:  # a pair of two dialogues has no prompt
            yield from _message_lines(row[key])
        yield from _other_columns(row, key)
        return
    config = replace(SFTDataConfig(), prompt_key=key, max_length=1 << 20, on_bad_row="skip")
    if response_key is not None:
        config = replace(config, response_key=response_key)
    dataset_class = MultiTurnSFTDataset if key == MESSAGES_COLUMN else SFTDataset
    example = dataset_class(None, tokenizer, config, rows=[row])[0]
    ids, mask = example["input_ids"], example["loss_mask"]
    yield f"{len(ids):,} tokens, of which {sum(mask):,} are learnt:"
    start = 0
    while start < len(ids):
        end = next((i for i in range(start, len(ids)) if mask[i] != mask[start]), len(ids))
        text = tokenizer.decode(ids[start:end], skip_special_tokens=False)
        yield _indent(text, "learnt | " if mask[start] else "       | ")
        start = end
    yield from _other_columns(row, key, response_key)


def _other_columns(row: Row, *shown_columns: str | None) -> Iterator[str]:
    for name, value in row.items():
        if name not in shown_columns and value is not None:
            yield f"{name}: {format_value(value)}"


def _message_lines(prompt: Prompt) -> Iterator[str]:
    for message in as_messages(prompt):
        content = message["content"]
        yield f"{message['role']}:"
        yield _indent(content if isinstance(content, str) else format_value(content))


def _indent(text: str, prefix: str = "  | ") -> str:
    return "\n".join(f"{prefix}{line}" for line in text.split("\n"))


def format_value(value: JsonValue) -> str:
    """Formats a value on one line, shortened; a value that is not text becomes JSON."""
    if isinstance(value, str):
        text = value.replace("\n", "\\n")
    else:
        try:
            text = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError):
            text = short_repr(value)
    if len(text) <= _MAX_VALUE_CHARACTERS:
        return text
    return f"{text[:_MAX_VALUE_CHARACTERS]}… ({len(text):,} characters)"
