"""Reads data into a `RowStore`: parquet, jsonl and json files, rows in memory, tables, PURE's files."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hone.config.data import DataConfig
from hone.data.prompts import FileRows, RowStore
from hone.data.rows import (
    SUFFIXES,
    TRAINING_SETTING,
    BadRowPolicy,
    DataError,
    Files,
    SettingError,
    expand_files,
    file_fingerprint,
    has_type,
)
from hone.text import BadText, error_text, find_flaw, read_json, read_yaml
from hone.types import Fields, JsonValue, Row, Settings

if TYPE_CHECKING:
    from hone.data.loader import Dataset

PURE_PROMPT_KEY = "question"
"""The `data.prompt_key` of PURE's files, whose rows are {question, answer, data_source?}."""
PURE_INSTRUCTION = (
    'Please reason step by step, separate the steps with "\\n\\n", and put the final answer within '
    "\\boxed{}."
)
PURE_DATA_SOURCE = "numina_olympiads"  # PURE's data source for rows that have none

MIN_BOMB_BYTES = 1 << 30
MAX_EXPANSION = 1000
"""A parquet file that decompresses to more bytes than both limits is refused; the second is a ratio."""


def _parse_json_line(line: str) -> tuple[JsonValue, tuple[str, str] | None]:
    """Returns (row, problem); a problem is (reason, message), or None."""
    try:
        row = read_json(line)
    except BadText as error:
        flaw = find_flaw(line)
        return None, ("invalid text", flaw) if flaw else ("not json", f"not JSON: {error}")
    # Only escapes and bytes that are not UTF-8 (`surrogateescape`) can make the text invalid.
    if not line.isascii() or "\\u" in line:
        return _with_text_problem(row)
    return row, None


def _with_text_problem(row: JsonValue) -> tuple[JsonValue, tuple[str, str] | None]:
    flaw = find_flaw(row, allow_nul=True)
    return row, ("invalid text", flaw) if flaw else None


def _parse_document(text: str) -> Row | None:
    """Returns the only row of a json file, which may span lines; None for a row per line."""
    try:
        row = read_json(text)
    except BadText:
        return None
    return row if isinstance(row, dict) else None


def _read_json(path: str, bad_rows: BadRowPolicy) -> FileRows:
    open_file: Callable[..., Any] = gzip.open if path.endswith(".gz") else open
    rows: list[Row] = []
    row_numbers = []
    # Bytes that are not UTF-8 become lone surrogates, so that only their row is rejected. The
    # encoding drops a byte order mark, which some editors write.
    with open_file(path, "rt", encoding="utf-8-sig", errors="surrogateescape") as file:
        is_document = path.removesuffix(".gz").endswith(".json")
        text = file.read() if is_document else ""
        if text.lstrip().startswith("["):
            values = map(_with_text_problem, read_json(text))
        elif is_document and (document := _parse_document(text)) is not None:
            values = map(_with_text_problem, [document])
        else:  # a string may contain U+2028, so only "\n" ends a line
            lines = text.split("\n") if is_document else file
            values = map(_parse_json_line, (line for line in lines if line.strip()))
        for number, (row, problem) in enumerate(values):
            if problem is None and isinstance(row, dict):
                rows.append(row)
                row_numbers.append(number)
                continue
            type_name = type(row).__name__
            reason, text = problem or ("not an object", f"a {type_name}, not an object of columns")
            bad_rows.report(reason, f"{path}, row {number}: {text}")
    return FileRows(path, rows, row_numbers)


def _read_parquet(path: str, bad_rows: BadRowPolicy) -> FileRows:
    """Reads a parquet file; a row is bad if text is not UTF-8 or a timestamp is out of range."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file_size = os.path.getsize(path)
    max_bytes = max(MIN_BOMB_BYTES, MAX_EXPANSION * file_size)
    num_bytes = 0
    with pq.ParquetFile(path) as file:
        tables = [file.schema_arrow.empty_table()]
        for index in range(file.num_row_groups):
            tables.append(file.read_row_group(index))
            num_bytes += tables[-1].nbytes
            if num_bytes > max_bytes:
                bad_rows.report(
                    "unreadable file",
                    f"{path}: its {file_size:,} bytes decompress to more than {max_bytes:,}; if the rows "
                    "are right, write them as jsonl",
                )
                return FileRows(path, [], [])
    table = pa.concat_tables(tables)
    if not any(has_type(data_type, pa.types.is_temporal) for data_type in table.schema.types):
        try:
            table.validate(full=True)
            return FileRows(path, table, range(table.num_rows))
        except pa.ArrowInvalid:  # the error names no row
            pass
    row_numbers = []
    for number in range(table.num_rows):
        try:
            table.slice(number, 1).to_pylist()
            row_numbers.append(number)
        except (ValueError, OverflowError) as error:
            reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "unreadable value"
            bad_rows.report(reason, f"{path}, row {number}: {reason}: {error}")
    return FileRows(path, table.take(pa.array(row_numbers, pa.int64())), row_numbers)


def read_file(
    path: str | os.PathLike[str], bad_rows: BadRowPolicy, setting: str = TRAINING_SETTING
) -> FileRows | None:
    """Reads one file; returns None if the file has no good row and the policy is `skip`."""
    import pyarrow as pa

    path = os.path.expanduser(os.fspath(path))
    if not path.endswith(SUFFIXES) and not os.path.isdir(path):
        raise DataError(f"{path}: unknown kind of data file; use one of {', '.join(SUFFIXES)}")
    if not os.path.isfile(path):
        reason = "is a folder, name its files" if os.path.isdir(path) else "does not exist"
        raise DataError(f"data file {path} {reason}; check {setting}")
    bad_rows_before = bad_rows.total
    reader = _read_parquet if path.endswith(".parquet") else _read_json
    try:
        rows = reader(path, bad_rows)
    except (pa.ArrowException, BadText, OSError, EOFError, zlib.error, MemoryError) as error:
        bad_rows.report("unreadable file", f"{path}: cannot be read: {error_text(error)}")
        return None
    if len(rows) == 0:
        if bad_rows.total == bad_rows_before:
            bad_rows.report("empty file", f"{path}: has no rows")
        return None
    return dataclasses.replace(rows, fingerprint=file_fingerprint(path))


def read_rows(files: Files, bad_rows: BadRowPolicy, setting: str = TRAINING_SETTING) -> RowStore:
    """Reads the rows of all files, or takes a list of rows; error messages mention `setting`."""
    if not isinstance(files, (str, os.PathLike)):
        rows = [dict(row) for row in files if isinstance(row, Mapping)]
        if rows and len(rows) == len(files):
            content = json.dumps(rows, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
            fingerprint = hashlib.blake2b(content, digest_size=16).hexdigest()
            return RowStore([FileRows("rows in memory", rows, range(len(rows)), fingerprint)])
    paths = expand_files(files, setting)
    readable_files = [file for path in paths if (file := read_file(path, bad_rows, setting))]
    if not readable_files:
        raise DataError(
            f"no rows could be read from {', '.join(paths)}: {'; '.join(bad_rows.examples)}"
        )
    return RowStore(readable_files)


def as_data_config(config: DataConfig | Settings) -> DataConfig:
    """Converts a mapping with some of the data keys to a DataConfig; other keys are ignored.

    In a DataConfig, defaults that refer to other blocks of a run's config become plain values.
    """
    defaults: Fields = {"tool_config_path": None, "trust_remote_code": False}
    if isinstance(config, DataConfig):
        replacements = {
            name: value
            for name, value in defaults.items()
            if str(getattr(config, name)).startswith("${")
        }
        return dataclasses.replace(config, **replacements) if replacements else config
    names = {field.name for field in dataclasses.fields(DataConfig)}
    values = {name: value for name, value in config.items() if name in names}
    return dataclasses.replace(DataConfig(), **{**defaults, **values})


def rows_of(data: Dataset) -> list[Row] | None:
    """Returns the rows of a list, Arrow table, Hugging Face dataset or DataFrame, else None."""
    if isinstance(data, (list, tuple)):
        return list(data)
    for method in ("to_pylist", "to_list"):
        if hasattr(data, method):
            return list(getattr(data, method)())
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        return [
            {name: None if _is_missing(value) else value for name, value in row.items()}
            for row in data.to_dict("records")
        ]
    return None


def _is_missing(value: object) -> bool:
    """Returns whether a value of a DataFrame is missing; pandas marks missing values with NaN."""
    return isinstance(value, float) and math.isnan(value)


def collate_tensors(data_list: Sequence[Row]) -> dict[str, Any]:
    """Collates rows as verl's `collate_fn` does: stacks tensors, puts the rest in arrays."""
    import torch

    from hone.data.prompts import collate_fn

    columns: dict[str, Any] = dict(collate_fn(data_list))
    for name, values in columns.items():
        if all(isinstance(value, torch.Tensor) for value in values):
            columns[name] = torch.stack(list(values))
    return columns


def to_verl_schema(store: RowStore, prompt_key: str) -> RowStore:
    """Converts the rows of PURE's files to verl's schema; other files stay as they are."""
    if prompt_key != PURE_PROMPT_KEY:
        return store
    return RowStore([_convert_file(file) for file in store.files])


def _convert_file(file: FileRows) -> FileRows:
    first = file[0]
    if "answer" not in first or "reward_model" in first:
        return file
    rows: list[Row] = []
    for index, row in enumerate(file.scan()):
        question, answer = row.get(PURE_PROMPT_KEY), row.get("answer")
        if isinstance(answer, str) and "####" in answer:
            raise DataError(
                f"{file.where(index)}: 'answer' is a worked solution of GSM8K, not a final answer; "
                "convert the file with `hone data prepare gsm8k`"
            )
        if isinstance(question, str) and question:
            question = f"{question}\n\n{PURE_INSTRUCTION}"
        source = row.get("data_source") or PURE_DATA_SOURCE
        reward_model = {"style": "rule", "ground_truth": answer}
        columns = {"data_source": source, "reward_model": reward_model}
        rows.append({**row, PURE_PROMPT_KEY: question, **columns})
    return dataclasses.replace(file, content=rows)


def load_tool_schemas(config: DataConfig) -> list[Mapping[str, Any]] | None:
    """Loads the tool schemas of data.tool_config_path for the chat template."""
    path = config.tool_config_path
    if not path:
        return None
    try:
        document = read_yaml(path)
    except BadText as error:
        raise SettingError(str(error), path) from error
    tools = (document.get("tools") if isinstance(document, Mapping) else None) or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise SettingError(f"{path} needs `tools:`, a list of objects", path)
    return [tool["tool_schema"] for tool in tools if tool.get("tool_schema")] or None
