"""Where upstream's records come from (a folder of files, or the hub), and the row made of one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from hone.data.hub import hub_splits
from hone.data.rows import SUFFIXES, BadRows, DataError, read_file
from hone.types import JsonValue, Row

Splits = dict[str, list[Row]]
MakeRow = Callable[[Row, str, int], Row | None]
"""(record, split, index) -> row, or None for a record that is left out."""


@dataclass(frozen=True)
class Upstream:
    """A data set's names: its folder(s) and file stems locally, its path and config on the hub."""

    folders: Sequence[str]
    """Folder names it may have; the first is the usual one."""
    hub: str
    config: str | None = None
    splits: Mapping[str, Sequence[str]] = field(
        default_factory=lambda: {"train": ("train",), "test": ("test",)}
    )
    """Our split -> the names it may have upstream (`stem`, or `folder/stem`), best first."""


class Source:
    """A folder or the hub, from which splits are read."""

    def __init__(self, source_dir: str | os.PathLike[str] | None = None) -> None:
        self.folder = None if source_dir is None else Path(source_dir).expanduser()
        self._hub: dict[tuple[str, str | None], Splits] = {}
        if self.folder is not None and not self.folder.is_dir():
            raise DataError(f"source folder {self.folder} does not exist")

    def find(self, upstream: Upstream, split: str) -> list[Row] | None:
        """The records of a split, or None where the source has none."""
        if self.folder is not None:
            path = self.path(upstream, split)
            file = None if path is None else read_file(path, BadRows("raise"))
            return None if file is None else list(file.scan())
        key = (upstream.hub, upstream.config)
        if key not in self._hub:
            self._hub[key] = hub_splits(*key)
        names = (name for name in upstream.splits[split] if name in self._hub[key])
        return next((self._hub[key][name] for name in names), None)

    def path(self, upstream: Upstream, split: str) -> Path | None:
        """The file of a split in the folder."""
        assert self.folder is not None
        for name in upstream.splits[split]:
            *inside, stem = name.split("/")
            for folder, suffix in product(inside or (*upstream.folders, "."), SUFFIXES):
                if (path := self.folder / folder / f"{stem}{suffix}").is_file():
                    return path
        return None

    def need(self, upstream: Upstream, *splits: str) -> Splits:
        """Those of the splits (all of the upstream's by default) that exist; an error when none does."""
        splits = splits or tuple(upstream.splits)
        found = {split: self.find(upstream, split) for split in splits}
        present = {split: records for split, records in found.items() if records is not None}
        if not present:
            names = [name for split in splits for name in upstream.splits[split]]
            where = f"folder {self.folder}" if self.folder else f"hub data set {upstream.hub}"
            raise DataError(
                f"{where} has none of {', '.join(names)} for {upstream.folders[0]}; files are"
                f" looked for as {upstream.folders[0]}/{names[0]}.parquet|jsonl|jsonl.gz|json"
            )
        return present

    def rows(self, upstream: Upstream, make: MakeRow) -> Splits:
        """The rows of every split that exists."""
        return rows_by_split(self.need(upstream), make)


def rows_by_split(splits: Splits, make: MakeRow) -> Splits:
    """The rows of the records of each split."""
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
    """A row in verl's schema, with `prompt` as the user message."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    return {
        "data_source": data_source,
        "prompt": [*messages, {"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": style, "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, **extra_info},
    }
