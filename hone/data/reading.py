"""Converts what a user passes to `RLHFDataset`: config, tool schemas, rows in memory, PURE's files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hone.config.data import DataConfig
from hone.data.rows import DataError, FileRows, RowStore, SettingError
from hone.text import BadText, read_yaml
from hone.types import Fields, Row, Settings

if TYPE_CHECKING:
    from hone.data.loader import Dataset

PURE_PROMPT_KEY = "question"
"""The `data.prompt_key` of PURE's files, whose rows are {question, answer, data_source?}."""
PURE_INSTRUCTION = (
    'Please reason step by step, separate the steps with "\\n\\n", and put the final answer within '
    "\\boxed{}."
)
PURE_DATA_SOURCE = "numina_olympiads"  # PURE's data source for rows that have none


def as_data_config(config: DataConfig | Settings) -> DataConfig:
    """Converts a mapping with some of the data keys to a DataConfig; other keys are ignored.

    In a DataConfig, defaults that refer to other blocks of a run's config become plain values.
    """
    defaults: Fields = {"tool_config_path": None, "trust_remote_code": False}
    if isinstance(config, DataConfig):
        replacements = {
            n: v for n, v in defaults.items() if str(getattr(config, n)).startswith("${")
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

    from hone.data.loader import collate_fn

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
