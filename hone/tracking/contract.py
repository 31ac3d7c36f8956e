"""The tracker interface: a tracker receives the metrics of each step, and rows of samples."""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Protocol

from hone.errors import UserError
from hone.text import clean_text
from hone.types import JsonValue, Row, Settings

Number = int | float


class Scalar(Protocol):
    """A one-element array or tensor of any library."""

    def item(self) -> Number: ...


@dataclass(frozen=True)
class RunInfo:
    """Describes the tracked run; every tracker's constructor receives a RunInfo."""

    project_name: str
    experiment_name: str
    config: Settings = field(default_factory=dict)
    folder: Path | None = None
    """The run folder; None if nothing may be written."""
    total_steps: int | None = None
    """Total steps of the run, for the ETA; None if unknown."""
    resumed_from: int | None = None
    """The step of the checkpoint that this process resumes from; None for a fresh run."""
    will_train: bool = True
    """Whether the run logs the steps after `resumed_from`; False for a run that only validates."""
    prints_every_metric: bool = False
    """Whether the console prints every metric of a step (`trainer.console=full`)."""


class Tracker:
    """Base class of tracker backends; a subclass must define `log`."""

    stops_run_on_failure = False
    """Whether a failed write stops the run; otherwise failures are only counted."""
    package: str | None = None
    """The optional package that the tracker imports; `check_trackers` looks for it before a run starts."""

    def __init__(self, run: RunInfo) -> None:
        self.run = run

    def log(self, metrics: Mapping[str, Number], step: int) -> None:
        raise NotImplementedError

    def log_samples(self, name: str, rows: Sequence[Row], step: int) -> None:
        """Shows a table of samples; does nothing in backends without tables."""

    def finish(self) -> None:
        """Flushes and closes the tracker at the end of the run."""


class TrackerError(UserError, ValueError):
    """Raised for an unknown or uninstalled tracker, and for a value that cannot be logged."""


def as_numbers(metrics: Mapping[str, Number | Scalar]) -> dict[str, Number]:
    """Converts Python, numpy and torch scalars to numbers; an integer that no float can hold becomes ±inf."""
    return {clean_text(str(key)): _as_number(key, value) for key, value in metrics.items()}


def _as_number(key: str, value: Number | Scalar) -> Number:
    number: Number | Scalar = value
    if hasattr(value, "item") and not isinstance(value, int | float):
        with contextlib.suppress(ValueError, TypeError, RuntimeError):  # more than one element
            number = value.item()
    if isinstance(number, int):
        if abs(number) <= sys.float_info.max:
            return int(number)
        return math.inf if number > 0 else -math.inf
    if isinstance(number, float):
        return float(number)
    raise TrackerError(
        f"metric {key!r} is {type(value).__name__} {str(value)[:60]!r}, not a number; "
        "reduce it to one number before logging"
    )


def flatten(config: Settings, prefix: str = "") -> Iterator[tuple[str, JsonValue]]:
    """Yields `("a.b", 1)` for `{"a": {"b": 1}}`; lists are not flattened."""
    for key, value in config.items():
        dotted_key = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{dotted_key}.")
        else:
            yield dotted_key, value


def import_optional(package: str, tracker: str) -> ModuleType:
    """Imports the package of a tracker; if the package is missing, TrackerError has the install command."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise TrackerError(
            f"tracker {tracker!r} needs the package {package!r} ({error}): "
            f"pip install 'hone-rl[{tracker}]', or remove {tracker!r} from trainer.logger"
        ) from error
