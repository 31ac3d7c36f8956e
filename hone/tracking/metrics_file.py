"""`metrics.jsonl`, the record of a run: one JSON object per line, with "step" and sorted keys."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from hone.tracking.atomic import atomic_write_bytes
from hone.tracking.contract import Number, RunInfo, Scalar, Tracker, TrackerError, as_numbers
from hone.tracking.lock import require_lock
from hone.types import JsonObject, Row

log = logging.getLogger(__name__)

STEP = "step"
NONFINITE = "_nonfinite"


def encode_line(metrics: Mapping[str, Number], step: int) -> str:
    """Encodes strict JSON: NaN and infinities become null and are listed in `_nonfinite`."""
    nonfinite: JsonObject = {k: repr(v) for k, v in metrics.items() if not math.isfinite(v)}
    line: JsonObject = {k: None if k in nonfinite else v for k, v in metrics.items()}
    if nonfinite:
        line[NONFINITE] = nonfinite
    line[STEP] = step
    return json.dumps(line, sort_keys=True, allow_nan=False)


def decode_line(line: str | bytes) -> Row | None:
    """Decodes a line and restores NaN and infinities; returns None for an incomplete line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get(STEP), int):
        return None
    nonfinite = row.pop(NONFINITE, None)
    for key, value in nonfinite.items() if isinstance(nonfinite, dict) else ():
        with contextlib.suppress(ValueError, TypeError):  # an invalid entry: the value stays null
            row[key] = float(value)
    return row


class MetricsFile:
    """Appends metrics, reads them, and truncates them to a step."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def append(self, metrics: Mapping[str, Number | Scalar], step: int) -> None:
        """Writes one line without buffering."""
        numbers = as_numbers(metrics)
        if STEP in numbers and numbers.pop(STEP) != step:
            raise ValueError(f"metrics contain step={metrics[STEP]} but are logged at step={step}")
        line = (encode_line(numbers, step) + "\n").encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(self.path, "ab", buffering=0) as file:
                # Start a new line after the partial line of a killed writer.
                file.write(b"\n" + line if self._ends_mid_line() else line)
        except OSError as error:
            reason = f"cannot append step {step} ({error.strerror}): free space or fix access"
            raise OSError(error.errno, reason, str(self.path)) from error

    def rows(self) -> Iterator[Row]:
        """Yields every line in order; skips and logs incomplete ones."""
        for number, row in self.lines():
            if row is not None:
                yield row
            else:
                log.warning("%s:%d is not a metrics line; skipped", self.path, number)

    def lines(self) -> Iterator[tuple[int, Row | None]]:
        """Yields the number and metrics of every non-blank line; None for an incomplete one."""
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, decode_line(line)

    def truncate_after(self, step: int) -> int:
        """Removes lines after `step` and incomplete ones in one atomic write; returns how many."""
        if not self.path.exists():
            return 0
        lines = [line for line in self.path.read_bytes().split(b"\n") if line.strip()]
        remaining = [line for line in lines if (row := decode_line(line)) and row[STEP] <= step]
        if len(remaining) < len(lines) or self._ends_mid_line():
            atomic_write_bytes(self.path, b"".join(line + b"\n" for line in remaining))
        return len(lines) - len(remaining)

    def _ends_mid_line(self) -> bool:
        with open(self.path, "rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"


def read_metrics(path: str | os.PathLike[str]) -> list[Row]:
    """Reads the lines of a `metrics.jsonl`, or of the one in a run folder."""
    return list(MetricsFile(metrics_at(path)).rows())


def metrics_at(path: str | os.PathLike[str]) -> Path:
    """Returns the `metrics.jsonl` for a path to the file or to its run folder."""
    file = Path(path)
    if file.is_dir():
        file = file / "metrics.jsonl"
    if not file.is_file():
        raise FileNotFoundError(
            f"no metrics at {file}: name a run folder (it holds metrics.jsonl) or the file itself"
        )
    return file


def series(rows: list[Row], key: str) -> tuple[list[int], list[float]]:
    """Returns steps and values of a key, by step; the last value of a repeated step counts."""
    by_step = {row[STEP]: float(row[key]) for row in rows if row.get(key) is not None}
    steps = sorted(by_step)
    return steps, [by_step[step] for step in steps]


class JsonlTracker(Tracker):
    """Writes each step to `metrics.jsonl` in the run folder; a failed write stops the run."""

    stops_run_on_failure = True

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        if run.folder is None:
            raise TrackerError("tracker 'jsonl' needs a run folder to write metrics.jsonl to")
        self.file = MetricsFile(run.folder / "metrics.jsonl")

    def log(self, metrics: Mapping[str, Number], step: int) -> None:
        require_lock(self.file.path.parent)
        self.file.append(metrics, step)
