"""Reads rows of parquet, jsonl and json files into one store; bad rows raise or are counted."""

from __future__ import annotations

import bisect
import glob
import gzip
import hashlib
import json
import os
import random
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from hone.data.files import copy_to_local, glob_remote, is_non_local
from hone.text import BadText, clean_text, described, flaw_of, read_json
from hone.types import Function, JsonValue, Row

if TYPE_CHECKING:
    import pyarrow as pa

Files: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str] | Row]
"""One data file or several; a program may pass rows instead of files."""
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".json.gz")
TRAINING_KEYS = "data.train_files and data.val_files"
"""The config keys of a training run's files; other programs pass their own keys."""


class DataError(ValueError, AssertionError):
    """Raised for a bad data file, row or state; code written for verl catches AssertionError."""


class SettingError(DataError):
    """Raised for an unusable file of the config; `path` is the value of its key."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


@dataclass
class BadRowPolicy:
    """The policy for bad rows (`raise` or `skip`), and the bad rows so far."""

    policy: str
    counts: Counter[str] = field(default_factory=Counter)
    """Skipped rows by reason."""
    examples: list[str] = field(default_factory=list)
    """The first messages, for the log."""
    skip_key: str | None = "data.on_bad_row"
    """The config key of the policy; None if the program has none."""

    MAX_EXAMPLES = 20

    def __post_init__(self) -> None:
        if self.policy not in ("raise", "skip"):
            raise DataError(f"data.on_bad_row={self.policy!r} is not known; use raise or skip")

    def report(self, reason: str, message: str) -> None:
        """Raises `message`, or counts it under `reason`."""
        message = clean_text(message)
        if self.policy == "raise":
            hint = f" ({self.skip_key}=skip skips and counts such rows)" if self.skip_key else ""
            raise DataError(f"{message}{hint}")
        self.counts[reason] += 1
        if len(self.examples) < self.MAX_EXAMPLES:
            self.examples.append(message)

    @property
    def total(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True)
class FileRows:
    """The usable rows of one file; rows of an Arrow table are converted when they are read."""

    path: str
    source: pa.Table | list[Row]
    numbers: Sequence[int]
    """Zero-based row numbers in the file; bad rows leave gaps."""
    fingerprint: str = ""
    """Hash of the file's content."""

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Row:
        if isinstance(self.source, list):
            return self.source[index]
        return dict(self.source.slice(index, 1).to_pylist()[0])

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        """Yields all rows in order; `columns` selects the columns."""
        if isinstance(self.source, list):
            for row in self.source:
                yield row if columns is None else {n: row[n] for n in columns if n in row}
            return
        present = self.source.column_names
        table = self.source.select([name for name in columns or present if name in present])
        if not table.column_names:
            yield from ({} for _ in range(len(self)))
        for batch in table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()

    def where(self, index: int) -> str:
        return f"{self.path}, row {self.numbers[index]}"


def expand_files(files: Files, keys: str = TRAINING_KEYS) -> list[str]:
    """Expands `~`, `$VAR` and `*` patterns in one or more names; every pattern must match a file.

    Files in a remote store are copied to this machine.
    """
    names = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    if not names:
        raise DataError(f"no data files were named; check {keys}")
    paths: list[str] = []
    for name in names:
        if isinstance(name, Mapping):
            raise DataError(f"rows and files are mixed in {keys}; give only rows or only files")
        path = os.path.expanduser(os.path.expandvars(os.fspath(name)))
        is_pattern = glob.has_magic(path) and not os.path.exists(path)
        try:
            find = glob_remote if is_non_local(path) else glob.glob
            matches = (
                [copy_to_local(p) for p in sorted(find(path))]
                if is_pattern
                else [copy_to_local(path)]
            )
        except OSError as error:
            raise SettingError(f"{path} cannot be read: {error}; check {keys}", path) from error
        if not matches:
            raise DataError(f"no file matches {path!r}; check {keys}")
        paths.extend(matches)
    return paths


def file_fingerprint(path: str) -> str:
    """Returns a hash of the file's bytes, which is the same on every machine."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def positions_fingerprint(store: RowStore, positions: Sequence[int]) -> str:
    """Returns a hash of the file contents and the positions in use."""
    content = store.fingerprint.encode() + array("q", positions).tobytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def sample_positions(
    positions: list[int], count: int, *, shuffle: bool, seed: int | None
) -> list[int]:
    """Returns `count` positions in order, sampled with `shuffle`; all of them if count <= 0."""
    if not 0 < count < len(positions):
        return positions
    if not shuffle:
        return positions[:count]
    return sorted(random.Random(f"max_samples:{seed}").sample(positions, count))


def _parse_json_line(line: str) -> tuple[JsonValue, tuple[str, str] | None]:
    try:
        row = read_json(line)
    except BadText as error:
        flaw = flaw_of(line)
        return None, ("hostile text", flaw) if flaw else ("not json", f"not JSON: {error}")
    # Only an escape or a byte that is not UTF-8 (`surrogateescape`) can make the text invalid.
    if not line.isascii() or "\\u" in line:
        return _with_text_flaw(row)
    return row, None


def _with_text_flaw(row: JsonValue) -> tuple[JsonValue, tuple[str, str] | None]:
    flaw = flaw_of(row, allow_nul=True)
    return row, ("hostile text", flaw) if flaw else None


def _read_json(path: str, bad: BadRowPolicy) -> FileRows:
    opener: Function = gzip.open if path.endswith(".gz") else open
    rows: list[Row] = []
    numbers = []
    # Bytes that are not UTF-8 become lone surrogates, so that only their row is rejected. The
    # encoding drops a byte order mark, which some editors write.
    with opener(path, "rt", encoding="utf-8-sig", errors="surrogateescape") as file:
        is_document = path.removesuffix(".gz").endswith(".json")
        text = file.read() if is_document else ""
        if text.lstrip().startswith("["):
            values = map(_with_text_flaw, read_json(text))
        else:  # a string may contain U+2028, so only "\n" ends a line
            lines = text.split("\n") if is_document else file
            values = map(_parse_json_line, (line for line in lines if line.strip()))
        for number, (row, flaw) in enumerate(values):
            if flaw is None and not isinstance(row, dict):
                flaw = "not an object", f"a {type(row).__name__}, not an object of columns"
            if flaw is not None:
                bad.report(flaw[0], f"{path}, row {number}: {flaw[1]}")
            elif isinstance(row, dict):
                rows.append(row)
                numbers.append(number)
    return FileRows(path, rows, numbers)


def _read_parquet(path: str, bad: BadRowPolicy) -> FileRows:
    """Reads a parquet file; text that is not UTF-8 and times out of range make a row bad."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # partitioning=None: a folder called `split=train` must not become a column.
    table = pq.read_table(path, partitioning=None)
    if not any(_has_type(kind, pa.types.is_temporal) for kind in table.schema.types):
        try:
            table.validate(full=True)
            return FileRows(path, table, range(table.num_rows))
        except pa.ArrowInvalid:  # the error names no row
            pass
    numbers = []
    for number in range(table.num_rows):
        try:
            table.slice(number, 1).to_pylist()
            numbers.append(number)
        except (ValueError, OverflowError) as error:
            reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "unreadable value"
            bad.report(reason, f"{path}, row {number}: {reason}: {error}")
    return FileRows(path, table.take(numbers), numbers)


def _has_type(kind: pa.DataType, test: Callable[[pa.DataType], bool]) -> bool:
    """Returns whether a type or one of its nested types passes the test."""
    return test(kind) or any(_has_type(kind.field(i).type, test) for i in range(kind.num_fields))


def read_file(
    path: str | os.PathLike[str], bad: BadRowPolicy, keys: str = TRAINING_KEYS
) -> FileRows | None:
    """Reads one file; returns None if it is unreadable or empty and bad rows are skipped."""
    import pyarrow as pa

    path = os.path.expanduser(os.fspath(path))
    if not path.endswith(SUFFIXES):
        raise DataError(f"{path}: unknown kind of data file; use one of {', '.join(SUFFIXES)}")
    if not os.path.isfile(path):
        reason = "is a folder, name its files" if os.path.isdir(path) else "does not exist"
        raise DataError(f"data file {path} {reason}; check {keys}")
    bad_before = bad.total
    read = _read_parquet if path.endswith(".parquet") else _read_json
    try:
        rows = read(path, bad)
    except (pa.ArrowException, BadText, OSError, EOFError, zlib.error, MemoryError) as error:
        bad.report("unreadable file", f"{path}: cannot be read: {described(error)}")
        return None
    if len(rows) == 0:
        if bad.total == bad_before:
            bad.report("empty file", f"{path}: has no rows")
        return None
    return replace(rows, fingerprint=file_fingerprint(path))


class RowStore:
    """All rows of several files, indexed by one position."""

    def __init__(self, files: Sequence[FileRows]) -> None:
        self.files = list(files)
        self._starts = [0, *accumulate(map(len, self.files))]
        self._names: list[str] = []
        num_copies: Counter[str] = Counter()
        for file in self.files:  # a file that is listed twice gets two names, for unique uids
            copy_number = num_copies[file.fingerprint]
            num_copies[file.fingerprint] += 1
            self._names.append(
                f"{file.fingerprint}#{copy_number}" if copy_number else file.fingerprint
            )

    def __len__(self) -> int:
        return self._starts[-1]

    def _locate(self, position: int) -> tuple[int, int]:
        if not 0 <= position < len(self):
            raise IndexError(f"row {position} of {len(self)}")
        file = bisect.bisect_right(self._starts, position) - 1
        return file, position - self._starts[file]

    def __getitem__(self, position: int) -> Row:
        file, index = self._locate(position)
        return self.files[file][index]

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        return (row for file in self.files for row in file.scan(columns))

    def file_of(self, position: int) -> int:
        return self._locate(position)[0]

    def where(self, position: int) -> str:
        file, index = self._locate(position)
        return self.files[file].where(index)

    def key(self, position: int) -> tuple[str, int]:
        """Returns (dataset name, row number in it), from which a uid is made."""
        file, index = self._locate(position)
        return self._names[file], int(self.files[file].numbers[index])

    @property
    def fingerprint(self) -> str:
        return hashlib.blake2b("\n".join(self._names).encode(), digest_size=16).hexdigest()


def read_rows(files: Files, bad: BadRowPolicy, keys: str = TRAINING_KEYS) -> RowStore:
    """Reads the rows of all files, or of a list of rows; `keys` are the files' config keys."""
    if not isinstance(files, (str, os.PathLike)):
        rows = [dict(row) for row in files if isinstance(row, Mapping)]
        if rows and len(rows) == len(files):
            content = json.dumps(rows, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
            fingerprint = hashlib.blake2b(content, digest_size=16).hexdigest()
            return RowStore([FileRows("rows in memory", rows, range(len(rows)), fingerprint)])
    paths = expand_files(files, keys)
    read = [file for path in paths if (file := read_file(path, bad, keys)) is not None]
    if not read:
        raise DataError(f"no rows could be read from {', '.join(paths)}: {'; '.join(bad.examples)}")
    return RowStore(read)


def as_table(rows: Sequence[Row]) -> pa.Table:
    """Converts rows to an Arrow table for parquet; raises DataError if a column has mixed types.

    Parquet has no struct without fields, so a `{}` in a column without other fields becomes null.
    """
    import pyarrow as pa

    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):  # the columns of all rows
        values = [row.get(name) for row in rows]
        try:
            column = pa.array(values)
            if _has_type(
                column.type, lambda kind: pa.types.is_struct(kind) and not kind.num_fields
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
    """Yields a temporary path and renames it to `path`: readers never see a partial file."""
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
