"""Reads upstream records from a folder or the Hub, and builds rows from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from hone.data.hub import hub_splits
from hone.data.reading import read_file
from hone.data.rows import SUFFIXES, BadRowPolicy, DataError
from hone.types import JsonValue, Row

Splits = dict[str, list[Row]]
MakeRow = Callable[[Row, str, int], Row | None]
"""Maps (record, split, index) to a row, or to None to skip the record."""


@dataclass(frozen=True)
class UpstreamDataset:
    """The names of a dataset: its local folders and file stems, its path and config on the Hub."""

    folders: Sequence[str]  # possible folder names, the usual name first
    hub_path: str
    config_name: str | None = None
    splits: Mapping[str, Sequence[str]] = field(
        default_factory=lambda: {"train": ("train",), "test": ("test",)}
    )
    """Possible upstream names of each split (`stem` or `folder/stem`), preferred first."""


class Source:
    """Reads splits from a folder or the Hub."""

    def __init__(self, source_dir: str | os.PathLike[str] | None = None) -> None:
        self.folder = None if source_dir is None else Path(source_dir).expanduser()
        self._hub_splits: dict[tuple[str, str | None], Splits] = {}
        if self.folder is not None and not self.folder.is_dir():
            raise DataError(f"source folder {self.folder} does not exist")

    def find_records(self, upstream: UpstreamDataset, split: str) -> list[Row] | None:
        """Returns the records of a split, or None if the source has none."""
        if self.folder is not None:
            path = self.split_file(upstream, split)
            file = None if path is None else read_file(path, BadRowPolicy("raise"))
            return None if file is None else list(file.scan())
        key = (upstream.hub_path, upstream.config_name)
        if key not in self._hub_splits:
            self._hub_splits[key] = hub_splits(*key)
        names = (name for name in upstream.splits[split] if name in self._hub_splits[key])
        return next((self._hub_splits[key][name] for name in names), None)

    def split_file(self, upstream: UpstreamDataset, split: str) -> Path | None:
        """Returns the file of a split in the source folder, or None if there is none."""
        assert self.folder is not None
        for name in upstream.splits[split]:
            *subfolders, stem = name.split("/")
            for folder, suffix in product(subfolders or (*upstream.folders, "."), SUFFIXES):
                path = self.folder / folder / f"{stem}{suffix}"
                if path.is_file():
                    return path
        return None

    def existing_splits(self, upstream: UpstreamDataset) -> Splits:
        """Returns the splits that exist; raises DataError if none exists."""
        pairs = ((split, self.find_records(upstream, split)) for split in upstream.splits)
        existing_splits = {split: records for split, records in pairs if records is not None}
        if not existing_splits:
            names = [name for names in upstream.splits.values() for name in names]
            where = f"folder {self.folder}" if self.folder else f"Hub data set {upstream.hub_path}"
            raise DataError(
                f"{where} has none of {', '.join(names)} for {upstream.folders[0]}; files are"
                f" looked for as {upstream.folders[0]}/{names[0]}.parquet|jsonl|jsonl.gz|json"
            )
        return existing_splits

    def build_rows(self, upstream: UpstreamDataset, make_row: MakeRow) -> Splits:
        """Builds the rows of every split that exists."""
        return rows_by_split(self.existing_splits(upstream), make_row)


def rows_by_split(splits: Splits, make_row: MakeRow) -> Splits:
    """Builds rows from the records of each split."""
    return {
        split: [row for i, record in enumerate(records) if (row := make_row(record, split, i))]
        for split, records in splits.items()
    }


def task_row(
    data_source: str,
    prompt: str,
    ability: str,
    ground_truth: JsonValue,
    split: str,
    index: int,
    *,
    style: str = "rule",
    system: str | None = None,
    **extra_info: JsonValue,
) -> Row:
    """Builds a row in verl's schema, with `prompt` as the user message."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    return {
        "data_source": data_source,
        "prompt": [*messages, {"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": style, "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, **extra_info},
    }
