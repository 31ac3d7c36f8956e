"""Reads upstream records from a folder or the Hub, and builds rows from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from hone.data.hub import hub_splits
from hone.data.rows import SUFFIXES, BadRowPolicy, DataError, read_file
from hone.types import JsonValue, Row

Splits = dict[str, list[Row]]
MakeRow = Callable[[Row, str, int], Row | None]
"""(record, split, index) -> row, or None to skip the record."""


@dataclass(frozen=True)
class Upstream:
    """The names of a dataset: local folders and file stems, and its path and config on the Hub."""

    folders: Sequence[str]
    """Possible folder names; the first is the usual one."""
    hub: str
    config: str | None = None
    splits: Mapping[str, Sequence[str]] = field(
        default_factory=lambda: {"train": ("train",), "test": ("test",)}
    )
    """Our split -> its possible upstream names (`stem` or `folder/stem`), best first."""


class Source:
    """Reads splits from a folder or the Hub."""

    def __init__(self, source_dir: str | os.PathLike[str] | None = None) -> None:
        self.folder = None if source_dir is None else Path(source_dir).expanduser()
        self._hub: dict[tuple[str, str | None], Splits] = {}
        if self.folder is not None and not self.folder.is_dir():
            raise DataError(f"source folder {self.folder} does not exist")

    def find(self, upstream: Upstream, split: str) -> list[Row] | None:
        """Returns the records of a split, or None if the source has none."""
        if self.folder is not None:
            path = self.path(upstream, split)
            file = None if path is None else read_file(path, BadRowPolicy("raise"))
            return None if file is None else list(file.scan())
        key = (upstream.hub, upstream.config)
        if key not in self._hub:
            self._hub[key] = hub_splits(*key)
        names = (name for name in upstream.splits[split] if name in self._hub[key])
        return next((self._hub[key][name] for name in names), None)

    def path(self, upstream: Upstream, split: str) -> Path | None:
        """Returns the file of a split in the folder, or None."""
        assert self.folder is not None
        for name in upstream.splits[split]:
            *inside, stem = name.split("/")
            for folder, suffix in product(inside or (*upstream.folders, "."), SUFFIXES):
                if (path := self.folder / folder / f"{stem}{suffix}").is_file():
                    return path
        return None

    def need(self, upstream: Upstream, *splits: str) -> Splits:
        """Returns the splits that exist (of all by default); raises DataError if none does."""
        splits = splits or tuple(upstream.splits)
        by_split = {split: self.find(upstream, split) for split in splits}
        present = {split: records for split, records in by_split.items() if records is not None}
        if not present:
            names = [name for split in splits for name in upstream.splits[split]]
            where = f"folder {self.folder}" if self.folder else f"hub data set {upstream.hub}"
            raise DataError(
                f"{where} has none of {', '.join(names)} for {upstream.folders[0]}; files are"
                f" looked for as {upstream.folders[0]}/{names[0]}.parquet|jsonl|jsonl.gz|json"
            )
        return present

    def rows(self, upstream: Upstream, make: MakeRow) -> Splits:
        """Builds the rows of every split that exists."""
        return rows_by_split(self.need(upstream), make)


def rows_by_split(splits: Splits, make: MakeRow) -> Splits:
    """Builds rows from the records of each split."""
    return {
        split: [row for i, record in enumerate(records) if (row := make(record, split, i))]
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
