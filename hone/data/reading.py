"""How `RLHFDataset` gets its rows, in the steps that a subclass may override in verl.

The rows of `self.dataframe` are checked, filtered and tokenised as those of a file are.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hone.config.data import DataConfig
from hone.data.files import copy_to_local, is_non_local
from hone.data.hub import as_frame
from hone.data.prompts import Message, as_messages
from hone.data.rows import BadRows, DataError, RowStore, read_rows
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


class OverridableReading:
    """The steps; `read_all` calls them."""

    data_files: Sequence[str | os.PathLike[str] | Row]
    bad_rows: BadRows
    prompt_key: str
    store: RowStore
    _frame: Dataset | None = None

    def read_all(self) -> None:
        """Fill `self.store`."""
        self._download()
        self._read_files_and_tokenize()
        if not hasattr(self, "store"):
            raise DataError(
                f"{type(self).__name__}._read_files_and_tokenize sets no self.dataframe"
            )
        if self._overrides("_build_messages"):
            takes_key = "key" in inspect.signature(self._build_messages).parameters
            key = {"key": self.prompt_key} if takes_key else {}
            self.dataframe = [
                {**row, self.prompt_key: self._build_messages(dict(row), **key)}
                for row in self.store.scan()
            ]

    def _download(self, use_origin_parquet: bool = False) -> None:
        """Copy remote files here; the copies become `self.data_files`."""
        files = self.data_files
        if any(isinstance(file, str) and is_non_local(file) for file in files):
            self.data_files = [f if isinstance(f, dict) else copy_to_local(f) for f in files]

    def _read_files_and_tokenize(self) -> None:
        """Read `self.data_files`; an override sets `self.dataframe`."""
        self.store = read_rows(self.data_files, self.bad_rows)
        if self._overrides("maybe_filter_out_long_prompts"):
            self.dataframe = self.maybe_filter_out_long_prompts(self.dataframe)

    def maybe_filter_out_long_prompts(self, dataframe: Dataset) -> Dataset:
        """The rows themselves: `data.filter_overlong_prompts` is applied when all are read."""
        return dataframe

    def _build_messages(self, example: Row, key: str | None = None) -> list[Message]:
        """Take the messages out of a row."""
        return as_messages(example.pop(key or self.prompt_key))

    @property
    def dataframe(self) -> Dataset:
        """The rows as a Hugging Face data set (a list without that package); setting it replaces them."""
        if self._frame is None:
            is_read = hasattr(self, "positions")
            rows = [self.raw_row(i) for i in range(len(self))] if is_read else self.store.scan()
            self._frame = as_frame(list(rows))
        return self._frame

    @dataframe.setter
    def dataframe(self, data: Dataset) -> None:
        rows = rows_of(data)
        if not rows:
            raise DataError(f"self.dataframe of {type(self).__name__} has no rows: {type(data)}")
        self._frame = data
        self.store = read_rows(rows, self.bad_rows)

    def _overrides(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(OverridableReading, name)

    def raw_row(self, index: int) -> Row:
        return self.store[index]

    def __len__(self) -> int:
        return len(self.store)
