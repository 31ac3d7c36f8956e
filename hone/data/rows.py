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
from typing import TYPE_CHECKING, Any, TypeAlias

from hone.data.files import copy_to_local, glob_remote, is_non_local
from hone.text import BadText, clean_text, error_text, find_flaw, read_json
from hone.types import JsonValue, Row

if TYPE_CHECKING:
    import pyarrow as pa

Files: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str] | Row]
"""One data file or several; a program may pass rows instead of files."""
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".json.gz")
TRAINING_SETTING = "data.train_files and data.val_files"
"""The settings that name the files of a training run; messages mention them."""


class DataError(ValueError, AssertionError):
    """Raised for a bad data file, row or state; code written for verl catches AssertionError."""


class SettingError(DataError):
    """Raised for a file that a config key names and that cannot be used; `path` is the key's value."""

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
    """The config key that sets the policy, for messages; None if the program has no such key."""

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


@dataclass(frozen=True)
class FileRows:
    """The usable rows of one file; rows of an Arrow table become dicts when they are read."""

    path: str
    content: pa.Table | list[Row]
    row_numbers: Sequence[int]  # zero-based row numbers in the file; bad rows leave gaps
    fingerprint: str = ""  # hash of the file's content

    def __len__(self) -> int:
        return len(self.row_numbers)

    def __getitem__(self, index: int) -> Row:
        if isinstance(self.content, list):
            return self.content[index]
        return dict(self.content.slice(index, 1).to_pylist()[0])

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        """Yields all rows in order; `columns` selects the columns."""
        if isinstance(self.content, list):
            for row in self.content:
                yield row if columns is None else {n: row[n] for n in columns if n in row}
            return
        names = self.content.column_names
        table = self.content.select([name for name in columns or names if name in names])
        if not table.column_names:
            yield from ({} for _ in range(len(self)))
            return
        for batch in table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()

    def where(self, index: int) -> str:
        """Returns the file and number of a row, for messages."""
        return f"{self.path}, row {self.row_numbers[index]}"


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
            names_of_files = sorted(glob_files(path)) if is_pattern else [path]
            matches = [copy_to_local(file) for file in names_of_files]
        except OSError as error:
            raise SettingError(f"{path} cannot be read: {error}; check {setting}", path) from error
        if not matches:
            raise DataError(f"no file matches {path!r}; check {setting}")
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
    """Returns a hash of the file contents and of the positions in use."""
    content = store.fingerprint.encode() + array("q", positions).tobytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def sample_positions(
    positions: list[int], count: int, *, shuffle: bool, seed: int | None
) -> list[int]:
    """Returns `count` positions (all if not positive): a random sample with `shuffle`, or the first."""
    if not 0 < count < len(positions):
        return positions
    if not shuffle:
        return positions[:count]
    return sorted(random.Random(f"max_samples:{seed}").sample(positions, count))


def _parse_json_line(line: str) -> tuple[JsonValue, tuple[str, str] | None]:
    try:
        row = read_json(line)
    except BadText as error:
        flaw = find_flaw(line)
        return None, ("invalid text", flaw) if flaw else ("not json", f"not JSON: {error}")
    # Only an escape or a byte that is not UTF-8 (`surrogateescape`) can make the text invalid.
    if not line.isascii() or "\\u" in line:
        return _with_text_problem(row)
    return row, None


def _with_text_problem(row: JsonValue) -> tuple[JsonValue, tuple[str, str] | None]:
    flaw = find_flaw(row, allow_nul=True)
    return row, ("invalid text", flaw) if flaw else None


def _read_json(path: str, bad_rows: BadRowPolicy) -> FileRows:
    open_file: Callable[..., Any] = gzip.open if path.endswith(".gz") else open
    rows: list[Row] = []
    numbers = []
    # Bytes that are not UTF-8 become lone surrogates, so that only their row is rejected. The
    # encoding drops a byte order mark, which some editors write.
    with open_file(path, "rt", encoding="utf-8-sig", errors="surrogateescape") as file:
        is_document = path.removesuffix(".gz").endswith(".json")
        text = file.read() if is_document else ""
        if text.lstrip().startswith("["):
            values = map(_with_text_problem, read_json(text))
        else:  # a string may contain U+2028, so only "\n" ends a line
            lines = text.split("\n") if is_document else file
            values = map(_parse_json_line, (line for line in lines if line.strip()))
        for number, (row, problem) in enumerate(values):
            if problem is None and isinstance(row, dict):
                rows.append(row)
                numbers.append(number)
                continue
            kind = type(row).__name__
            reason, text = problem or ("not an object", f"a {kind}, not an object of columns")
            bad_rows.report(reason, f"{path}, row {number}: {text}")
    return FileRows(path, rows, numbers)


def _read_parquet(path: str, bad_rows: BadRowPolicy) -> FileRows:
    """Reads a parquet file; a row is bad if text is not UTF-8 or a timestamp is out of range."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # partitioning=None: a folder called `split=train` must not become a column.
    table = pq.read_table(path, partitioning=None)
    if not any(_has_type(data_type, pa.types.is_temporal) for data_type in table.schema.types):
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
            bad_rows.report(reason, f"{path}, row {number}: {reason}: {error}")
    return FileRows(path, table.take(numbers), numbers)


def _has_type(data_type: pa.DataType, predicate: Callable[[pa.DataType], bool]) -> bool:
    """Returns whether the predicate holds for a type or one of its nested types."""
    return predicate(data_type) or any(
        _has_type(data_type.field(i).type, predicate) for i in range(data_type.num_fields)
    )


def read_file(
    path: str | os.PathLike[str], bad_rows: BadRowPolicy, setting: str = TRAINING_SETTING
) -> FileRows | None:
    """Reads one file; returns None if it has no good row and the policy is `skip`."""
    import pyarrow as pa

    path = os.path.expanduser(os.fspath(path))
    if not path.endswith(SUFFIXES) and not os.path.isdir(path):
        raise DataError(f"{path}: unknown kind of data file; use one of {', '.join(SUFFIXES)}")
    if not os.path.isfile(path):
        reason = "is a folder, name its files" if os.path.isdir(path) else "does not exist"
        raise DataError(f"data file {path} {reason}; check {setting}")
    bad_rows_before = bad_rows.total
    reader = _read_parquet if path.endswith(".parquet") else _read_json
    try:
        rows = reader(path, bad_rows)
    except (pa.ArrowException, BadText, OSError, EOFError, zlib.error, MemoryError) as error:
        bad_rows.report("unreadable file", f"{path}: cannot be read: {error_text(error)}")
        return None
    if len(rows) == 0:
        if bad_rows.total == bad_rows_before:
            bad_rows.report("empty file", f"{path}: has no rows")
        return None
    return replace(rows, fingerprint=file_fingerprint(path))


class RowStore:
    """The rows of several files, indexed by position from the first file's first row."""

    def __init__(self, files: Sequence[FileRows]) -> None:
        self.files = list(files)
        self._file_starts = [0, *accumulate(map(len, self.files))]
        self._dataset_names: list[str] = []
        num_copies: Counter[str] = Counter()
        for file in self.files:
            # A file that is listed twice gets two names, so that uids are unique.
            suffix = f"#{num_copies[file.fingerprint]}" if num_copies[file.fingerprint] else ""
            self._dataset_names.append(file.fingerprint + suffix)
            num_copies[file.fingerprint] += 1

    def __len__(self) -> int:
        return self._file_starts[-1]

    def _locate(self, position: int) -> tuple[int, int]:
        """Returns (index of the file, index of the row in it)."""
        if not 0 <= position < len(self):
            raise IndexError(f"row {position} of {len(self)}")
        file_index = bisect.bisect_right(self._file_starts, position) - 1
        return file_index, position - self._file_starts[file_index]

    def __getitem__(self, position: int) -> Row:
        file_index, index = self._locate(position)
        return self.files[file_index][index]

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        return (row for file in self.files for row in file.scan(columns))

    def file_index_of(self, position: int) -> int:
        return self._locate(position)[0]

    def where(self, position: int) -> str:
        """Returns the file and number of a row, for messages."""
        file_index, index = self._locate(position)
        return self.files[file_index].where(index)

    def key(self, position: int) -> tuple[str, int]:
        """Returns (dataset name, row number in it), from which a uid is made."""
        file_index, index = self._locate(position)
        return self._dataset_names[file_index], int(self.files[file_index].row_numbers[index])

    @property
    def fingerprint(self) -> str:
        return hashlib.blake2b("\n".join(self._dataset_names).encode(), digest_size=16).hexdigest()


def read_rows(files: Files, bad_rows: BadRowPolicy, setting: str = TRAINING_SETTING) -> RowStore:
    """Reads the rows of all files, or takes a list of rows; error messages mention `setting`."""
    if not isinstance(files, (str, os.PathLike)):
        rows = [dict(row) for row in files if isinstance(row, Mapping)]
        if rows and len(rows) == len(files):
            content = json.dumps(rows, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
            fingerprint = hashlib.blake2b(content, digest_size=16).hexdigest()
            return RowStore([FileRows("rows in memory", rows, range(len(rows)), fingerprint)])
    paths = expand_files(files, setting)
    readable_files = [file for path in paths if (file := read_file(path, bad_rows, setting))]
    if not readable_files:
        raise DataError(
            f"no rows could be read from {', '.join(paths)}: {'; '.join(bad_rows.examples)}"
        )
    return RowStore(readable_files)


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
            if _has_type(column.type, lambda t: pa.types.is_struct(t) and not t.num_fields):
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
