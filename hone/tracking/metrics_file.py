"""`metrics.jsonl`: one JSON object per line, with "step" and sorted keys; the record of a run."""

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
    """Strict JSON: NaN and infinities become null, and `_nonfinite` says which they were."""
    strange: JsonObject = {k: repr(v) for k, v in metrics.items() if not math.isfinite(v)}
    line: JsonObject = {k: None if k in strange else v for k, v in metrics.items()}
    if strange:
        line[NONFINITE] = strange
    line[STEP] = step
    return json.dumps(line, sort_keys=True, allow_nan=False)


def decode_line(line: str | bytes) -> Row | None:
    """The metrics of a line with NaN and infinities restored; None when the line is torn."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get(STEP), int):
        return None
    strange = row.pop(NONFINITE, None)
    for key, value in strange.items() if isinstance(strange, dict) else ():
        with contextlib.suppress(ValueError, TypeError):  # an unreadable note: the value stays null
            row[key] = float(value)
    return row


class MetricsFile:
    """Append metrics, read them back, or cut them back to a step."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def append(self, metrics: Mapping[str, Number | Scalar], step: int) -> None:
        """Write one line; it has left this process when the call returns."""
        numbers = as_numbers(metrics)
        if STEP in numbers and numbers.pop(STEP) != step:
            raise ValueError(f"metrics say step={metrics[STEP]} but are logged at step={step}")
        line = (encode_line(numbers, step) + "\n").encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(self.path, "ab", buffering=0) as file:
                # The half line of a killed writer must not swallow this one.
                file.write(b"\n" + line if self._ends_torn() else line)
        except OSError as error:
            reason = f"cannot append step {step} ({error.strerror}): free space or fix access"
            raise OSError(error.errno, reason, str(self.path)) from error

    def rows(self) -> Iterator[Row]:
        """Every line in order; torn ones (a killed writer's last) are skipped."""
        for number, row in self.lines():
            if row is not None:
                yield row
            else:
                log.warning("%s:%d is not a metrics line; skipped", self.path, number)

    def lines(self) -> Iterator[tuple[int, Row | None]]:
        """Number and metrics of every line that is not blank; None for a torn one."""
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, decode_line(line)

    def cut_back(self, step: int) -> int:
        """Drop the lines after `step`, and torn ones, in one atomic write; returns how many."""
        if not self.path.exists():
            return 0
        lines = [line for line in self.path.read_bytes().split(b"\n") if line.strip()]
        earlier = [line for line in lines if (row := decode_line(line)) and row[STEP] <= step]
        if len(earlier) < len(lines) or self._ends_torn():
            atomic_write_bytes(self.path, b"".join(line + b"\n" for line in earlier))
        return len(lines) - len(earlier)

    def _ends_torn(self) -> bool:
        with open(self.path, "rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"


def read_metrics(path: str | os.PathLike[str]) -> list[Row]:
    """The lines of a `metrics.jsonl`, or of the one in a run folder."""
    return list(MetricsFile(metrics_at(path)).rows())


def metrics_at(path: str | os.PathLike[str]) -> Path:
    """The `metrics.jsonl` that a path names: itself, or the one in the run folder it is."""
    file = Path(path)
    if file.is_dir():
        file = file / "metrics.jsonl"
    if not file.is_file():
        raise FileNotFoundError(
            f"no metrics at {file}: name a run folder (it holds metrics.jsonl) or the file itself"
        )
    return file


def series(rows: list[Row], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one key, ordered by step; a step logged again counts once, the last."""
    by_step = {row[STEP]: float(row[key]) for row in rows if row.get(key) is not None}
    steps = sorted(by_step)
    return steps, [by_step[step] for step in steps]


class JsonlTracker(Tracker):
    """Writes each step to `metrics.jsonl` in the run folder; a failed write stops the run."""

    is_the_record = True

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        if run.folder is None:
            raise TrackerError("tracker 'jsonl' needs a run folder to write metrics.jsonl to")
        self.file = MetricsFile(run.folder / "metrics.jsonl")

    def log(self, metrics: Mapping[str, Number], step: int) -> None:
        require_lock(self.file.path.parent)
        self.file.append(metrics, step)
