"""Reading rows: parquet, jsonl, jsonl.gz and json files become one store of plain dicts.

A bad file or row either stops the run with its file and row, or is skipped and counted.
Leaves out what a row means: prompts are in prompts.py, the row schema in dataset.py.
"""

from __future__ import annotations

import bisect
import glob
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from hone.text import BadText, clean_text, described, flaw_of, read_json
from hone.types import Function, JsonValue, Row

if TYPE_CHECKING:
    import pyarrow as pa

Files: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str] | Row]
"""One data file or several; a program may give rows in place of files."""
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".json.gz")
TRAINING_KEYS = "data.train_files and data.val_files"
"""The keys that name the files of a training run; other programs say their own."""


class DataError(ValueError, AssertionError):
    """A data file, row or loader state that cannot be used; says which and what to do.

    Code written for verl catches it as AssertionError.
    """


class SettingError(DataError):
    """A file of the configuration that cannot be used; `path` is what a key was set to."""

    def __init__(self, sentence: str, path: str) -> None:
        super().__init__(sentence)
        self.path = path


@dataclass
class BadRows:
    """The policy for bad rows (`raise` or `skip`) and what it has met so far."""

    policy: str
    counts: dict[str, int] = field(default_factory=dict)
    """How many were skipped, by reason."""
    examples: list[str] = field(default_factory=list)
    """The first few messages, for the log."""
    skip_key: str | None = "data.on_bad_row"
    """The key that chooses the policy; None where the program has none."""

    MAX_EXAMPLES = 20

    def __post_init__(self) -> None:
        if self.policy not in ("raise", "skip"):
            raise DataError(f"data.on_bad_row={self.policy!r} is not known; use raise or skip")

    def report(self, reason: str, message: str) -> None:
        """Raise `message`, or count it under `reason` and go on."""
        message = clean_text(message)
        if self.policy == "raise":
            hint = f" ({self.skip_key}=skip skips and counts such rows)" if self.skip_key else ""
            raise DataError(f"{message}{hint}")
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if len(self.examples) < self.MAX_EXAMPLES:
            self.examples.append(message)

    @property
    def total(self) -> int:
        return sum(self.counts.values())


class Rows(Protocol):
    """Random access to the rows of one file."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        """All rows in order; with only these columns where given (absent ones left out)."""
        ...


class _ArrowRows:
    """Rows of an Arrow table, turned into Python objects only when asked for.

    Its values are known to be readable: `_readable_rows` has left the others out.
    """

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        return dict(self._table.slice(index, 1).to_pylist()[0])

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        present = self._table.column_names
        table = self._table.select([name for name in columns or present if name in present])
        if not table.column_names:
            return iter({} for _ in range(len(self)))
        return (row for batch in table.to_batches(max_chunksize=1024) for row in batch.to_pylist())


class _JsonRows(list[Row]):
    """Rows parsed from JSON, kept as they are."""

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        if columns is None:
            return iter(self)
        return ({name: row[name] for name in columns if name in row} for row in self)


@dataclass(frozen=True)
class FileRows:
    """One file: its rows, the line or row number each has in it, and its content's fingerprint."""

    path: str
    rows: Rows
    numbers: Sequence[int]
    """Zero-based row number in the file of each kept row (bad lines leave gaps)."""
    fingerprint: str

    def where(self, index: int) -> str:
        return f"{self.path}, row {self.numbers[index]}"


def expand_files(files: Files, keys: str = TRAINING_KEYS) -> list[str]:
    """One name or many, with `~`, `$VAR` and `*` patterns expanded; a pattern must match."""
    names = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    if not names:
        raise DataError(f"no data files were named; check {keys}")
    paths: list[str] = []
    for name in names:
        if isinstance(name, Mapping):
            raise DataError(f"rows and files are mixed in {keys}; give the ones or the others")
        path = os.path.expanduser(os.path.expandvars(os.fspath(name)))
        is_pattern = glob.has_magic(path) and not os.path.exists(path)
        matches = sorted(glob.glob(path)) if is_pattern else [path]
        if not matches:
            raise DataError(f"no file matches {path!r}; check {keys}")
        paths.extend(matches)
    return paths


def file_fingerprint(path: str) -> str:
    """Hash of the file's bytes: the same data has the same name on every machine."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _json_lines(lines: Iterable[str], path: str, bad: BadRows) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(line for line in lines if line.strip()):
        try:
            row = read_json(line)
        except BadText as error:
            flaw = flaw_of(line)
            reason = "not json" if flaw is None else "hostile text"
            bad.report(reason, f"{path}, row {number}: {flaw or f'not JSON: {error}'}")
            continue
        # Only an escape, or a byte that was read by `surrogateescape`, can spoil the text.
        may_be_spoilt = not line.isascii() or "\\u" in line
        flaw = flaw_of(row, allow_nul=True) if may_be_spoilt else None
        yield from _sound(number, row, flaw, path, bad)


def _json_document(text: str, path: str, bad: BadRows) -> Iterator[tuple[int, Row]]:
    """A .json file: a list of objects, or, by its first character, one object a line."""
    if not text.lstrip().startswith("["):
        yield from _json_lines(text.split("\n"), path, bad)  # U+2028 may stand inside a string
        return
    for number, row in enumerate(read_json(text)):
        yield from _sound(number, row, flaw_of(row, allow_nul=True), path, bad)


def _sound(
    number: int, row: JsonValue, flaw: str | None, path: str, bad: BadRows
) -> Iterator[tuple[int, Row]]:
    if flaw is not None:
        bad.report("hostile text", f"{path}, row {number}: {flaw}")
    elif isinstance(row, dict):
        yield number, row
    else:
        kind = type(row).__name__
        bad.report("not an object", f"{path}, row {number}: a {kind}, not an object of columns")


def _read_json(path: str, bad: BadRows) -> tuple[Rows, Sequence[int]]:
    opener: Function = gzip.open if path.endswith(".gz") else open
    name = path.removesuffix(".gz")
    # Bytes that are not UTF-8 become lone surrogates, so that only their row is refused. A mark of
    # the byte order, which some editors write, is left out.
    with opener(path, "rt", encoding="utf-8-sig", errors="surrogateescape") as file:
        if name.endswith(".json"):
            numbered = list(_json_document(file.read(), path, bad))
        else:
            numbered = list(_json_lines(file, path, bad))
    return _JsonRows(row for _, row in numbered), [number for number, _ in numbered]


def _read_parquet(path: str, bad: BadRows) -> tuple[Rows, Sequence[int]]:
    import pyarrow.parquet as pq

    # partitioning=None: a folder called `split=train` must not become a column.
    table = pq.read_table(path, partitioning=None)
    numbers = _readable_rows(table, path, bad)
    return _ArrowRows(table if len(numbers) == len(table) else table.take(numbers)), numbers


def _readable_rows(table: pa.Table, path: str, bad: BadRows) -> Sequence[int]:
    """Numbers of the rows that Python can hold: text is UTF-8, times are within its range."""
    import pyarrow as pa

    if not any(_holds(kind, pa.types.is_temporal) for kind in table.schema.types):
        try:
            table.validate(full=True)
            return range(table.num_rows)
        except pa.ArrowInvalid:  # names no row
            pass
    readable = []
    for number in range(table.num_rows):
        try:
            table.slice(number, 1).to_pylist()
            readable.append(number)
        except (ValueError, OverflowError) as error:
            reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "unreadable value"
            bad.report(reason, f"{path}, row {number}: {reason}: {error}")
    return readable


def _holds(kind: pa.DataType, test: Callable[[pa.DataType], bool]) -> bool:
    """Whether a type, or one inside it, passes the test."""
    return test(kind) or any(_holds(kind.field(i).type, test) for i in range(kind.num_fields))


def read_file(
    path: str | os.PathLike[str], bad: BadRows, keys: str = TRAINING_KEYS
) -> FileRows | None:
    """The rows of one file; None when it is unreadable or empty and bad rows are skipped."""
    import pyarrow as pa

    path = os.path.expanduser(os.fspath(path))
    if not path.endswith(SUFFIXES):
        raise DataError(f"{path}: unknown kind of data file; use one of {', '.join(SUFFIXES)}")
    if not os.path.isfile(path):
        what = "is a folder, name its files" if os.path.isdir(path) else "does not exist"
        raise DataError(f"data file {path} {what}; check {keys}")
    bad_before = bad.total
    read = _read_parquet if path.endswith(".parquet") else _read_json
    try:
        rows, numbers = read(path, bad)
    except (pa.ArrowException, BadText, OSError, EOFError, zlib.error, MemoryError) as error:
        bad.report("unreadable file", f"{path}: cannot be read: {described(error)}")
        return None
    if len(rows) == 0:
        if bad.total == bad_before:
            bad.report("empty file", f"{path}: has no rows")
        return None
    return FileRows(path, rows, numbers, file_fingerprint(path))


class RowStore:
    """All rows of several files, addressed by one position; knows where each came from."""

    def __init__(self, files: Sequence[FileRows]) -> None:
        self.files = list(files)
        self._starts = [0, *accumulate(len(file.rows) for file in self.files)]
        self._names = _distinct_names(self.files)

    def __len__(self) -> int:
        return self._starts[-1]

    def _locate(self, position: int) -> tuple[int, int]:
        if not 0 <= position < len(self):
            raise IndexError(f"row {position} of {len(self)}")
        file = bisect.bisect_right(self._starts, position) - 1
        return file, position - self._starts[file]

    def __getitem__(self, position: int) -> Row:
        file, index = self._locate(position)
        return self.files[file].rows[index]

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        return (row for file in self.files for row in file.rows.scan(columns))

    def file_of(self, position: int) -> int:
        return self._locate(position)[0]

    def where(self, position: int) -> str:
        file, index = self._locate(position)
        return self.files[file].where(index)

    def key(self, position: int) -> tuple[str, int]:
        """(data set name, row number in it): what a uid is made of."""
        file, index = self._locate(position)
        return self._names[file], int(self.files[file].numbers[index])

    @property
    def fingerprint(self) -> str:
        return hashlib.blake2b("\n".join(self._names).encode(), digest_size=16).hexdigest()


def _distinct_names(files: Sequence[FileRows]) -> list[str]:
    """A file listed twice keeps two names, so that its rows never share a uid."""
    seen: dict[str, int] = {}
    names = []
    for file in files:
        copy = seen.get(file.fingerprint, 0)
        seen[file.fingerprint] = copy + 1
        names.append(file.fingerprint if copy == 0 else f"{file.fingerprint}#{copy}")
    return names


def read_rows(files: Files, bad: BadRows, keys: str = TRAINING_KEYS) -> RowStore:
    """Read every file; stops when nothing at all is left. `keys` named the files, for the errors.

    Rows themselves (dicts) may stand in place of files.
    """
    if not isinstance(files, (str, os.PathLike)):
        rows = [row for row in files if isinstance(row, Mapping)]
        if rows and len(rows) == len(files):
            return _in_memory(rows)
    paths = expand_files(files, keys)
    read = [file for path in paths if (file := read_file(path, bad, keys)) is not None]
    if not read:
        raise DataError(f"no rows could be read from {', '.join(paths)}: {'; '.join(bad.examples)}")
    return RowStore(read)


def _in_memory(rows: Sequence[Row]) -> RowStore:
    """Rows that a program made; their content names them, as a file's does."""
    content = json.dumps(rows, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
    fingerprint = hashlib.blake2b(content, digest_size=16).hexdigest()
    plain = _JsonRows(dict(row) for row in rows)
    return RowStore([FileRows("rows in memory", plain, range(len(plain)), fingerprint)])


def as_table(rows: Sequence[Row]) -> pa.Table:
    """The rows as an Arrow table that parquet can hold; a column that has no one type is named.

    Parquet knows no struct without fields: where a column has only `{}` in a place, it gets null there.
    """
    import pyarrow as pa

    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):  # not only the first row's
        values = [row.get(name) for row in rows]
        try:
            array = pa.array(values)
            if _holds(array.type, lambda kind: pa.types.is_struct(kind) and not kind.num_fields):
                array = pa.array([_without_empty_structs(value) for value in values])
        except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
            raise DataError(
                f"column {name!r} cannot be written to parquet ({error}); make its values one type"
            ) from error
        columns[name] = array
    return pa.table(columns)


def _without_empty_structs(value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        return {name: _without_empty_structs(inner) for name, inner in value.items()} or None
    if isinstance(value, list):
        return [_without_empty_structs(inner) for inner in value]
    return value


def write_parquet(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
    """Write rows under a temporary name, then rename: a reader never sees half a file."""
    import pyarrow.parquet as pq

    target = Path(path).expanduser()
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    table = as_table(rows)
    try:
        pq.write_table(table, temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
