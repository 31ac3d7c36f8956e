"""Writes the files of a generation job: finished rows while the job runs, then the output and a record."""

from __future__ import annotations

import glob
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from hone.data.rows import file_fingerprint, write_parquet
from hone.errors import UserError
from hone.tracking import atomic_path, atomic_write_text
from hone.tracking.atomic import add_file_name_to_errors
from hone.types import Row

log = logging.getLogger(__name__)

PARTS_SUFFIX = ".parts"
RESULT_COLUMNS = ("responses", "response_lengths", "stop_reasons", "log_probs", "scores")
"""The columns that `hone generate` and `hone eval` (`scores`) add to a row."""


class GenerationError(UserError, ValueError):
    """Raised when generation cannot run as configured."""


def join_results(row: Row, columns: Row) -> Row:
    """Returns a row with new result columns; the results of an earlier generation are removed."""
    old_columns = RESULT_COLUMNS if "responses" in row else ()
    return {name: value for name, value in row.items() if name not in old_columns} | columns


class JobFiles:
    """The files of a job.

    While the job runs, the folder `OUTPUT.HASH.parts` has one file of finished rows per rank. `OUTPUT.job`
    records the hashes of the job and of its output: a job does not replace the output of another job.
    """

    def __init__(self, output: Path, job_hash: str, rank: int) -> None:
        self.output, self.job_hash = output, job_hash
        self.folder = output.with_name(f"{output.stem}.{job_hash}{PARTS_SUFFIX}")
        self._part_file = self.folder / f"rank_{rank}.jsonl"
        self._record = output.with_name(f"{output.name}.job")

    def warn_about_other_jobs(self) -> None:
        """Logs a warning for each folder of finished rows that another job has left."""
        pattern = f"{glob.escape(self.output.stem)}.*{PARTS_SUFFIX}"
        for folder in sorted(self.folder.parent.glob(pattern)):
            if folder != self.folder:
                log.warning(
                    "%s is from another run (other data, model or sampling) that has not finished; "
                    "it is not used and can be deleted",
                    folder,
                )

    def finished_columns(self) -> dict[int, Row]:
        """Returns the generated columns of each finished row, from the parts of all ranks."""
        columns_by_row: dict[int, Row] = {}
        for file in sorted(self.folder.glob("rank_*.jsonl")):
            for line in file.read_bytes().split(b"\n"):
                try:
                    finished_row = json.loads(line)
                    columns_by_row[finished_row["row"]] = finished_row["columns"]
                except (ValueError, TypeError, KeyError, RecursionError):
                    continue  # an incomplete last line, left by a killed process
        return columns_by_row

    def append(self, row_index: int, columns: Row) -> None:
        """Writes the generated columns of a finished row to the part of this rank."""
        line = json.dumps({"row": row_index, "columns": columns}) + "\n"
        self.folder.mkdir(parents=True, exist_ok=True)
        with add_file_name_to_errors(self._part_file), self._part_file.open("ab+") as stream:
            if stream.seek(0, 2):
                stream.seek(-1, 2)
                if stream.read(1) != b"\n":  # a killed process left an incomplete line
                    stream.write(b"\n")
            stream.write(line.encode())

    def is_done(self, *, overwrite: bool) -> bool:
        """Returns whether this job's output exists, and deletes the parts of a job that is done.

        Raises an error if the file is another job's output and `overwrite` is false.
        """
        if not self.output.exists():
            return False
        try:
            record = json.loads(self._record.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            record = None
        if self.output.is_file() and record == self._job_record(self.output):
            # A process that was killed in `write` has left the parts.
            shutil.rmtree(self.folder, ignore_errors=True)
            return True
        if not overwrite:
            raise GenerationError(
                f"data.output_path={self.output} already exists and is not from this job (other rows, "
                "model or sampling, or changed since); name another data.output_path, delete the "
                "file, or replace it with data.overwrite=true"
            )
        return False

    def write(self, rows: Sequence[Row]) -> None:
        """Writes the output file and the job record, and deletes the parts.

        The record is written before the output gets its final name.
        """
        with atomic_path(self.output) as temporary:
            if self.output.suffix == ".parquet":
                write_parquet(rows, temporary)
            else:
                lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
                temporary.write_bytes("".join(lines).encode("utf-8", "backslashreplace"))
            atomic_write_text(self._record, json.dumps(self._job_record(temporary)) + "\n")
        shutil.rmtree(self.folder)

    def _job_record(self, file: Path) -> dict[str, str]:
        return {"job": self.job_hash, "output": file_fingerprint(str(file))}
