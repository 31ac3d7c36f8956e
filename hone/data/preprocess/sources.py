"""Where upstream's records come from: a folder of files, or the hub.

A folder holds one folder a data set (`gsm8k/train.jsonl.gz`), or is itself that folder.
Leaves out what records mean: each data set's file turns them into rows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hone.data.hub import hub_splits
from hone.data.rows import SUFFIXES, BadRows, DataError, read_file
from hone.types import Row


@dataclass(frozen=True)
class Upstream:
    """A data set's names: its folder(s) and file stems locally, its path and config on the hub."""

    folders: Sequence[str]
    """Folder names it may have; the first is the usual one."""
    splits: Mapping[str, Sequence[str]]
    """Our split → the names it may have upstream (`stem`, or `folder/stem`), best first."""
    hub: str
    config: str | None = None


class Source:
    """A folder or the hub, asked for one split at a time."""

    def __init__(self, source_dir: str | os.PathLike[str] | None = None) -> None:
        self.folder = None if source_dir is None else Path(source_dir).expanduser()
        self._hub: dict[tuple[str, str | None], dict[str, list[Row]]] = {}
        if self.folder is not None and not self.folder.is_dir():
            raise DataError(f"source folder {self.folder} does not exist")

    def find(self, upstream: Upstream, split: str) -> list[Row] | None:
        """The records of a split, or None where the source has none."""
        if self.folder is None:
            return self._find_on_hub(upstream, split)
        path = self.path(upstream, split)
        if path is None:
            return None
        rows = read_file(path, BadRows("raise"))
        assert rows is not None
        return [rows.rows[i] for i in range(len(rows.rows))]

    def path(self, upstream: Upstream, split: str) -> Path | None:
        """The file of a split in the folder."""
        assert self.folder is not None
        for name in upstream.splits[split]:
            *inside, stem = name.split("/")
            for folder in [self.folder.joinpath(f) for f in inside or upstream.folders]:
                for suffix in SUFFIXES:
                    if (found := folder / f"{stem}{suffix}").is_file():
                        return found
            for suffix in SUFFIXES:
                if not inside and (found := self.folder / f"{stem}{suffix}").is_file():
                    return found
        return None

    def _find_on_hub(self, upstream: Upstream, split: str) -> list[Row] | None:
        key = (upstream.hub, upstream.config)
        if key not in self._hub:
            self._hub[key] = hub_splits(*key)
        found = self._hub[key]
        names = [name for name in upstream.splits[split] if name in found]
        return found[names[0]] if names else None

    def need(self, upstream: Upstream, *splits: str) -> dict[str, list[Row]]:
        """Those of the splits that exist; an error when none does."""
        found = {split: self.find(upstream, split) for split in splits}
        present = {split: rows for split, rows in found.items() if rows is not None}
        if not present:
            wanted = [name for split in splits for name in upstream.splits[split]]
            where = f"folder {self.folder}" if self.folder else f"hub data set {upstream.hub}"
            raise DataError(
                f"{where} has none of {', '.join(wanted)} for {upstream.folders[0]}; files are"
                f" looked for as {upstream.folders[0]}/{wanted[0]}.parquet|jsonl|jsonl.gz|json"
            )
        return present
