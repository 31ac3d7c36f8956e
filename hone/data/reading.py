"""What `RLHFDataset` takes in verl's forms: settings, rows in memory; and verl's `collate_fn`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hone.config.data import DataConfig
from hone.types import Row, Settings

if TYPE_CHECKING:
    from hone.data.loader import Dataset


def settings_of(config: DataConfig | Settings) -> DataConfig:
    """The data settings of a config in verl's form, which may have a few keys only."""
    if isinstance(config, DataConfig):
        return config
    names = {field.name for field in dataclasses.fields(DataConfig)}
    values = {name: value for name, value in config.items() if name in names}
    unset = {"tool_config_path": None, "trust_remote_code": False}
    return dataclasses.replace(DataConfig(), **{**unset, **values})


def rows_of(data: Dataset) -> list[Row] | None:
    """The rows of a list, an Arrow table, a Hugging Face data set or a frame; None for a data set."""
    if isinstance(data, (list, tuple)):
        return list(data)
    for method in ("to_pylist", "to_list"):
        if hasattr(data, method):
            return list(getattr(data, method)())
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        return list(data.to_dict("records"))
    return None


def collate_tensors(data_list: Sequence[Row]) -> Row:
    """verl's `collate_fn`: columns of a batch as object arrays, with tensors stacked."""
    import torch

    from hone.data.loader import collate_fn

    columns: Row = dict(collate_fn(data_list))
    for name, values in columns.items():
        if all(isinstance(value, torch.Tensor) for value in values):
            columns[name] = torch.stack(list(values))
    return columns
