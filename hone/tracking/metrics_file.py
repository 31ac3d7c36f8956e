"""`metrics.jsonl`, the metrics of a run: one JSON object per line, with "step" and sorted keys."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from hone.tracking.atomic import atomic_write_bytes
from hone.tracking.contract import Number, RunInfo, Scalar, Tracker, TrackerError, as_numbers
from hone.tracking.lock import raise_if_lock_lost
from hone.types import Fields, JsonObject

log = logging.getLogger(__name__)

STEP_KEY = "step"
NONFINITE_KEY = "_nonfinite"

MetricsRow: TypeAlias = Fields
"""The metrics of one line by name, with the step of the line."""


def encode_line(metrics: Mapping[str, Number], step: int) -> str:
    """Encodes a line as strict JSON: NaN and infinities become null and are listed in `_nonfinite`."""
    line: JsonObject = {}
    nonfinite: JsonObject = {}
    for name, value in metrics.items():
        is_finite = math.isfinite(value)
        line[name] = value if is_finite else None
        if not is_finite:
            nonfinite[name] = repr(value)
    if nonfinite:
        line[NONFINITE_KEY] = nonfinite
    line[STEP_KEY] = step
    return json.dumps(line, sort_keys=True, allow_nan=False)


def decode_line(line: str | bytes) -> MetricsRow | None:
    """Decodes a line and restores NaN and infinities; returns None for an incomplete line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get(STEP_KEY), int):
        return None
    nonfinite = row.pop(NONFINITE_KEY, None)
    for key, value in nonfinite.items() if isinstance(nonfinite, dict) else ():
        with contextlib.suppress(ValueError, TypeError):  # an invalid entry: the value stays null
            row[key] = float(value)
    return row


class MetricsFile:
    """Appends lines of metrics, reads them, and removes lines after a step."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def append(self, metrics: Mapping[str, Number | Scalar], step: int) -> None:
        """Appends one line; the line is not lost if this process is killed afterwards."""
        numbers = as_numbers(metrics)
        if STEP_KEY in numbers and numbers.pop(STEP_KEY) != step:
            raise ValueError(
                f"metrics contain step={metrics[STEP_KEY]} but are logged at step={step}"
            )
        line = (encode_line(numbers, step) + "\n").encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Closing a buffered file writes all bytes or raises; a raw write may write only some.
            with open(self.path, "ab") as file:
                # Start a new line after the partial line of a killed writer.
                file.write(b"\n" + line if self._ends_mid_line() else line)
        except OSError as error:
            reason = (
                f"cannot append step {step} ({error.strerror}): free space or fix the permissions"
            )
            raise OSError(error.errno, reason, str(self.path)) from error

    def rows(self) -> Iterator[MetricsRow]:
        """Yields the metrics of every line; skips incomplete lines and logs a warning for each."""
        for line_number, row in self.lines():
            if row is not None:
                yield row
            else:
                log.warning("%s:%d is not a metrics line; skipped", self.path, line_number)

    def lines(self) -> Iterator[tuple[int, MetricsRow | None]]:
        """Yields the number of every non-blank line, and its metrics (None for an incomplete line)."""
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            for line_number, line in enumerate(file, start=1):
                if line.strip():
                    yield line_number, decode_line(line)

    def truncate_after(self, step: int) -> int:
        """Removes lines after `step` and incomplete lines in one atomic write; returns how many."""
        if not self.path.exists():
            return 0
        lines = [line for line in self.path.read_bytes().split(b"\n") if line.strip()]
        remaining_lines = []
        for line in lines:
            row = decode_line(line)
            if row is not None and row[STEP_KEY] <= step:
                remaining_lines.append(line)
        if len(remaining_lines) < len(lines) or self._ends_mid_line():
            atomic_write_bytes(self.path, b"".join(line + b"\n" for line in remaining_lines))
        return len(lines) - len(remaining_lines)

    def _ends_mid_line(self) -> bool:
        with open(self.path, "rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"


def read_metrics(path: str | os.PathLike[str]) -> list[MetricsRow]:
    """Reads the lines of a `metrics.jsonl`, or of the one in a run folder."""
    return list(MetricsFile(find_metrics_file(path)).rows())


def find_metrics_file(path: str | os.PathLike[str]) -> Path:
    """Returns the `metrics.jsonl` for a path to the file or to its run folder."""
    file = Path(path)
    if file.is_dir():
        file = file / "metrics.jsonl"
    if not file.is_file():
        raise FileNotFoundError(
            f"no metrics at {file}: name a run folder (it holds metrics.jsonl) or the file itself"
        )
    return file


def series(rows: list[MetricsRow], key: str) -> tuple[list[int], list[float]]:
    """Returns the steps and values of a key in order; a repeated step has its last value."""
    value_by_step = {row[STEP_KEY]: float(row[key]) for row in rows if row.get(key) is not None}
    steps = sorted(value_by_step)
    return steps, [value_by_step[step] for step in steps]


class JsonlTracker(Tracker):
    """Writes each step to `metrics.jsonl` in the run folder; a failed write stops the run."""

    stops_run_on_failure = True

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        if run.folder is None:
            raise TrackerError("tracker 'jsonl' needs a run folder to write metrics.jsonl to")
        self.file = MetricsFile(run.folder / "metrics.jsonl")

    def log(self, metrics: Mapping[str, Number], step: int) -> None:
        raise_if_lock_lost(self.file.path.parent)
        self.file.append(metrics, step)
