"""What a generation leaves on disk: parts while it runs, then the finished file with its job's record.

The record tells this job's own file from any other, so that nothing is replaced unasked.
Leaves out what the rows hold (generation.py).
"""

from __future__ import annotations

import glob
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from hone.data.rows import file_fingerprint, write_parquet
from hone.tracking import atomic_path, atomic_write_text
from hone.tracking.storage import naming
from hone.types import JsonValue, Row

log = logging.getLogger(__name__)

PARTS_SUFFIX = ".parts"
RECORD_SUFFIX = ".job"


class GenerationError(ValueError):
    """A generation run that cannot be done as asked."""


class Parts:
    """What is finished so far: a folder beside the output, one file of lines a rank.

    The folder is named by the job, so only the same job takes it up, whatever kind of file it writes.
    """

    def __init__(self, output: Path, job: str, rank: int) -> None:
        self.folder = output.with_name(f"{output.stem}.{job}{PARTS_SUFFIX}")
        self._others = f"{glob.escape(output.stem)}.*{PARTS_SUFFIX}"
        self._file = self.folder / f"rank_{rank}.jsonl"

    def name_others(self) -> None:
        """Say what unfinished runs of other jobs left beside the output."""
        for other in sorted(self.folder.parent.glob(self._others)):
            if other != self.folder:
                log.warning(
                    "%s is of another run (other data, model or sampling) that was not finished; "
                    "it is not used, and can be deleted",
                    other,
                )

    def finished(self) -> dict[int, Row]:
        """Row number to its new columns, from the files of all ranks."""
        found: dict[int, Row] = {}
        for file in sorted(self.folder.glob("rank_*.jsonl")):
            for line in file.read_bytes().split(b"\n"):
                try:
                    entry = json.loads(line)
                    found[entry["row"]] = entry["columns"]
                except (ValueError, TypeError, KeyError, RecursionError):
                    continue  # what a killed writer left of its last line
        return found

    def append(self, row: int, columns: Row) -> None:
        line = json.dumps({"row": row, "columns": columns}) + "\n"
        self.folder.mkdir(parents=True, exist_ok=True)  # not before there is something to keep
        with naming(self._file), self._file.open("a", encoding="utf-8") as stream:
            if stream.tell() and not _ends_whole(self._file):
                stream.write("\n")
            stream.write(line)

    def remove(self) -> None:
        shutil.rmtree(self.folder)


def _ends_whole(file: Path) -> bool:
    with file.open("rb") as stream:
        stream.seek(-1, 2)
        return stream.read(1) == b"\n"


class Output:
    """The finished file, and beside it `FILE.job`: which job wrote it, with a hash of its bytes."""

    def __init__(self, path: Path, job: str) -> None:
        self.path, self.job = path, job
        self.record = path.with_name(f"{path.name}{RECORD_SUFFIX}")

    def is_done(self, *, may_replace: bool) -> bool:
        """Whether this job's own file is there; a file that it did not write stops the run."""
        if not self.path.exists():
            return False
        if self.path.is_file() and self._recorded() == self._facts(self.path):
            return True
        if not may_replace:
            raise GenerationError(
                f"data.output_path={self.path} is there already, and not from this job (other rows, "
                "model or sampling, or changed since); name another data.output_path, remove the "
                "file, or replace it by data.overwrite=true"
            )
        return False

    def write(self, rows: Sequence[Row]) -> None:
        """The rows under a temporary name, the record, then the rename: no file without its record."""
        with atomic_path(self.path) as temporary:
            if self.path.suffix == ".parquet":
                write_parquet(rows, temporary)
            else:
                lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
                temporary.write_bytes("".join(lines).encode("utf-8", "backslashreplace"))
            atomic_write_text(self.record, json.dumps(self._facts(temporary)) + "\n")

    def _facts(self, file: Path) -> dict[str, str]:
        return {"job": self.job, "output": file_fingerprint(str(file))}

    def _recorded(self) -> JsonValue:
        try:
            record: JsonValue = json.loads(self.record.read_text(encoding="utf-8"))
            return record
        except (OSError, ValueError):  # no record, or none that can be read: not this job's
            return None


def files_of(path: str | None) -> tuple[str | None, list[tuple[str, int, int]]]:
    """Where a folder is, with name, size and time of its files; a hub name has only itself.

    A model written again in the same place has other times: reading all of its bytes would take long.
    """
    if path is None or not Path(path).is_dir():
        return path, []
    folder = Path(path)
    files = [(file.name, file.stat()) for file in folder.iterdir() if file.is_file()]
    return str(folder.resolve()), sorted((name, s.st_size, s.st_mtime_ns) for name, s in files)
