"""Converts Python rows to the dataset schema.

A row is a prompt, a pair of prompt and answer, or a dict with `prompt` (or `question`, `problem`) and
`answer` (or `ground_truth`, `solution`); other columns go into `extra_info`. verl's columns are kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, Union

import numpy as np

from hone.data.reading import read_rows, rows_of
from hone.data.rows import SUFFIXES, BadRowPolicy, DataError
from hone.data.schema import COLUMNS
from hone.data.values import decode_json
from hone.text import short_repr
from hone.tracking import atomic_write_text
from hone.types import Fields, JsonValue, Row

DataItem: TypeAlias = Union[
    str, "os.PathLike[str]", Fields, "Sequence[JsonValue]", "Sequence[Fields]"
]
Data: TypeAlias = Union[str, "os.PathLike[str]", Iterable[DataItem]]
"""File names, or rows in a list, a `datasets.Dataset`, a pandas DataFrame or an Arrow table."""

PROMPT_COLUMNS = ("prompt", "question", "problem")
ANSWER_COLUMNS = ("answer", "ground_truth", "solution")
RESPONSE_COLUMNS = ("response", "completion", *ANSWER_COLUMNS)
MESSAGES_COLUMN = "messages"
_SCHEMA_COLUMNS = {*COLUMNS, "ability"}


def file_names(data: Data) -> list[str] | None:
    """Returns the file names if `data` is a file name or a list of file names, else None."""
    if isinstance(data, (str, os.PathLike)):
        return [os.fspath(data)]
    names = data if isinstance(data, (list, tuple)) else ()
    if names and all(
        isinstance(name, (str, os.PathLike)) and str(name).endswith(SUFFIXES) for name in names
    ):
        return [os.fspath(name) for name in names]
    return None


def as_rows(data: Data) -> list[Row]:
    """Returns the rows as dicts; an item that is only a prompt becomes a row with the column `prompt`."""
    if (files := file_names(data)) is not None:
        return list(read_rows(files, BadRowPolicy("raise", policy_key=None), "data").scan())
    if isinstance(data, Mapping):
        names = ", ".join(map(str, data))
        raise DataError(
            f"data is a dict of {names}; give a list of rows, or one split: data['train']"
        )
    items = rows_of(data) or list(data)  # type: ignore[arg-type]
    if not items:
        raise DataError("the data have no rows")
    return [_as_row(item, number) for number, item in enumerate(items)]


def _is_nan(value: JsonValue) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _as_row(item: DataItem, number: int) -> Row:
    """Converts a dict, a prompt, or a pair of prompt and answer to a row."""
    if isinstance(item, Mapping):
        # A DataFrame has NaN for a missing value.
        return {name: None if _is_nan(value) else value for name, value in item.items()}
    is_chat = (
        isinstance(item, list) and item and all(isinstance(message, Mapping) for message in item)
    )
    if isinstance(item, str) or is_chat:
        return {"prompt": item}
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return {"prompt": item[0], "answer": item[1]}
    raise DataError(
        f"row {number} is {item!r:.80}; a row is a dict, a prompt, or a pair (prompt, answer)"
    )


def to_prompt_row(row: Row, number: int, default_source: str, *, with_prompt: bool = False) -> Row:
    """Converts a row to the dataset schema; `number` is its index in the data, for errors.

    `default_source` is the `data_source` of a row without this column. `with_prompt` also puts the prompt
    into `extra_info`, for a score function that reads prompts.
    """
    prompt_column = find_column(row, number, PROMPT_COLUMNS)
    answer_column = next((name for name in ANSWER_COLUMNS if name in row), "")
    prompt_row = {"data_source": default_source, "prompt": row[prompt_column]}
    prompt_row |= {name: value for name, value in row.items() if name in _SCHEMA_COLUMNS}
    prompt_row.setdefault("reward_model", {"style": "rule", "ground_truth": row.get(answer_column)})
    used_columns = (*_SCHEMA_COLUMNS, prompt_column, answer_column)
    extra_info = {name: value for name, value in row.items() if name not in used_columns}
    extra_info |= extra_info_of(row, number)
    extra_info |= {"prompt": row[prompt_column]} if with_prompt else {}
    return prompt_row | {"extra_info": extra_info}


def extra_info_of(row: Row, number: int) -> Fields:
    """Returns the `extra_info` of a row, which may be JSON text; empty if the row has none."""
    extra_info = decode_json(row.get("extra_info")) or {}
    if not isinstance(extra_info, Mapping):
        raise DataError(
            f"row {number}, column 'extra_info' must be an object, got {short_repr(extra_info)}"
        )
    return extra_info


def to_sft_rows(rows: Sequence[Row]) -> list[Row]:
    """Converts rows to the columns of SFT: `messages`, or `prompt` and `response`."""
    if MESSAGES_COLUMN in rows[0]:
        return list(rows)
    return [
        {
            "prompt": row[find_column(row, number, PROMPT_COLUMNS)],
            "response": row[find_column(row, number, RESPONSE_COLUMNS)],
        }
        for number, row in enumerate(rows)
    ]


def find_column(row: Row, number: int, names: Sequence[str]) -> str:
    """Returns the first of `names` that is a column of the row; raises DataError if none is."""
    for name in names:
        if name in row:
            return name
    alternatives = " or ".join(map(repr, names))
    raise DataError(f"row {number} has no column {alternatives}; it has {', '.join(map(str, row))}")


def write_rows(rows: Sequence[Row], folder: Path, name: str) -> str:
    """Writes the rows to a file in `folder`, named after a hash of the rows; returns the path."""
    text = "".join(_json_line(row, number) for number, row in enumerate(rows))
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    file = folder / "data" / f"{name}-{digest}.jsonl"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(file, text)
    return str(file)


def _json_line(row: Row, number: int) -> str:
    """Returns a row as a line of JSON; `number` names the row in an error message."""

    def to_json_value(value: np.generic) -> JsonValue:
        if hasattr(value, "tolist"):
            return value.tolist()
        raise TypeError(f"a {type(value).__name__}")

    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False, default=to_json_value) + "\n"
    except (TypeError, ValueError) as error:
        raise DataError(
            f"row {number} contains {error}; rows contain text, numbers, lists and dicts"
        ) from None
