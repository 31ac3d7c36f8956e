"""Converts the config and in-memory rows that a user passes to `RLHFDataset`, and collates rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hone.config.data import DataConfig
from hone.types import Row, Settings

if TYPE_CHECKING:
    from hone.data.loader import Dataset


def as_data_config(config: DataConfig | Settings) -> DataConfig:
    """Converts a mapping with some of the data keys to a DataConfig; other keys are ignored."""
    if isinstance(config, DataConfig):
        return config
    names = {field.name for field in dataclasses.fields(DataConfig)}
    values = {name: value for name, value in config.items() if name in names}
    defaults = {"tool_config_path": None, "trust_remote_code": False}
    return dataclasses.replace(DataConfig(), **{**defaults, **values})


def rows_of(data: Dataset) -> list[Row] | None:
    """Returns the rows of a list, Arrow table, Hugging Face dataset or DataFrame, else None."""
    if isinstance(data, (list, tuple)):
        return list(data)
    for method in ("to_pylist", "to_list"):
        if hasattr(data, method):
            return list(getattr(data, method)())
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        return list(data.to_dict("records"))
    return None


def collate_tensors(data_list: Sequence[Row]) -> dict[str, Any]:
    """Collates rows as verl's `collate_fn` does: stacks tensors, puts the rest in arrays."""
    import torch

    from hone.data.loader import collate_fn

    columns: dict[str, Any] = dict(collate_fn(data_list))
    for name, values in columns.items():
        if all(isinstance(value, torch.Tensor) for value in values):
            columns[name] = torch.stack(list(values))
    return columns
