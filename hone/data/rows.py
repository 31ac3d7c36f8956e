"""Data files of rows: their names, the policy for bad rows, and the writing of parquet files."""

from __future__ import annotations

import glob
import hashlib
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from hone.data.files import copy_to_local, glob_remote, is_non_local
from hone.errors import UserError
from hone.text import clean_text
from hone.types import JsonValue, Row

if TYPE_CHECKING:
    import pyarrow as pa

Files: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str] | Row]
"""One data file or several; a program may pass rows instead of files."""
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".json.gz")
TRAINING_SETTING = "data.train_files and data.val_files"
"""The settings that name the files of a training run; messages mention them."""


class DataError(UserError, ValueError, AssertionError):
    """Raised for a bad data file, row or state; code written for verl catches AssertionError."""


class SettingError(DataError):
    """Raised for an unusable file of the configuration; `path` is the value of the config key."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


@dataclass
class BadRowPolicy:
    """The policy for bad rows (`raise` or `skip`), and the counts of bad rows so far."""

    policy: str
    counts: Counter[str] = field(default_factory=Counter)  # number of skipped rows by reason
    examples: list[str] = field(default_factory=list)  # the first messages, for the log
    policy_key: str | None = "data.on_bad_row"
    """The config key of the policy, for messages; None in programs without the key."""

    MAX_EXAMPLES = 20

    def __post_init__(self) -> None:
        if self.policy not in ("raise", "skip"):
            raise DataError(f"data.on_bad_row={self.policy!r} is not known; use raise or skip")

    def report(self, reason: str, message: str) -> None:
        """Raises DataError with `message`, or counts the row under `reason`."""
        message = clean_text(message)
        if self.policy == "raise":
            key = self.policy_key
            hint = f" ({key}=skip skips and counts such rows)" if key else ""
            raise DataError(f"{message}{hint}")
        self.counts[reason] += 1
        if len(self.examples) < self.MAX_EXAMPLES:
            self.examples.append(message)

    @property
    def total(self) -> int:
        return sum(self.counts.values())


def expand_files(files: Files, setting: str = TRAINING_SETTING) -> list[str]:
    """Expands `~`, `$VAR` and `*` in one or more file names, and copies remote files."""
    names = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    if not names:
        raise DataError(f"no data files were named; check {setting}")
    paths: list[str] = []
    for name in names:
        if isinstance(name, Mapping):
            raise DataError(f"rows and files are mixed in {setting}; give only rows or only files")
        path = os.path.expanduser(os.path.expandvars(os.fspath(name)))
        is_pattern = glob.has_magic(path) and not os.path.exists(path)
        try:
            glob_files = glob_remote if is_non_local(path) else glob.glob
            files_of_name = sorted(glob_files(path)) if is_pattern else [path]
            local_paths = [copy_to_local(file) for file in files_of_name]
        except OSError as error:
            raise SettingError(f"{path} cannot be read: {error}; check {setting}", path) from error
        if not local_paths:
            raise DataError(f"no file matches {path!r}; check {setting}")
        paths.extend(local_paths)
    return paths


def file_fingerprint(path: str) -> str:
    """Returns a hash of the file's bytes, which is the same on every machine."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def sample_positions(
    positions: list[int], count: int, *, shuffle: bool, seed: int | None
) -> list[int]:
    """Returns a random sample (`shuffle`) or the first `count` positions; all if `count` <= 0."""
    if not 0 < count < len(positions):
        return positions
    if not shuffle:
        return positions[:count]
    return sorted(random.Random(f"max_samples:{seed}").sample(positions, count))


def as_table(rows: Sequence[Row]) -> pa.Table:
    """Converts rows to an Arrow table; raises DataError if a column has mixed types.

    Parquet has no struct without fields, so a `{}` in a column without other fields becomes null.
    """
    import pyarrow as pa

    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):  # the columns of all rows
        values = [row.get(name) for row in rows]
        try:
            column = pa.array(values)
            if has_type(
                column.type, lambda type_: pa.types.is_struct(type_) and not type_.num_fields
            ):
                column = pa.array([_without_empty_structs(value) for value in values])
        except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
            raise DataError(
                f"column {name!r} cannot be written to parquet ({error}); make its values one type"
            ) from error
        columns[name] = column
    return pa.table(columns)


def _without_empty_structs(value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        return {name: _without_empty_structs(item) for name, item in value.items()} or None
    if isinstance(value, list):
        return [_without_empty_structs(item) for item in value]
    return value


@contextmanager
def write_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path, then renames it to `path`, so that no reader sees a partial file."""
    target = Path(path).expanduser()
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def write_parquet(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
    import pyarrow.parquet as pq

    table = as_table(rows)
    with write_file(path) as temporary:
        pq.write_table(table, temporary)


def has_type(data_type: pa.DataType, predicate: Callable[[pa.DataType], bool]) -> bool:
    """Returns whether the predicate holds for a type or one of its nested types."""
    return predicate(data_type) or any(
        has_type(data_type.field(i).type, predicate) for i in range(data_type.num_fields)
    )
