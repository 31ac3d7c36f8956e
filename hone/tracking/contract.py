"""What a tracker is: an object that takes the metrics of a step, and sometimes sample rows."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Protocol

from hone.text import clean_text
from hone.types import JsonValue, Row, Settings

Number = int | float


class Scalar(Protocol):
    """A one-element array or tensor of any library."""

    def item(self) -> Number: ...


@dataclass(frozen=True)
class RunInfo:
    """The run that is tracked; every backend gets it when it is made."""

    project_name: str
    experiment_name: str
    config: Settings = field(default_factory=dict)
    folder: Path | None = None
    """The run folder; None when nothing may be written."""
    total_steps: int | None = None
    """How many steps the run will take, for the time left; None when unknown."""
    resumed_from: int | None = None
    """The step of the checkpoint this process continues from; None for a fresh run."""
    prints_everything: bool = False
    """Whether the console prints every metric of a step (`trainer.console=full`)."""


class Tracker:
    """A backend; a subclass must define `log`."""

    is_the_record = False
    """True where a failure to write must stop the run; others are counted and the run goes on."""

    def __init__(self, run: RunInfo) -> None:
        self.run = run

    def log(self, metrics: Mapping[str, Number], step: int) -> None:
        raise NotImplementedError

    def log_samples(self, name: str, rows: Sequence[Row], step: int) -> None:
        """Show a table of samples; backends without tables leave it out."""

    def finish(self) -> None:
        """The run is over: flush and close."""


class TrackerError(ValueError):
    """A tracker that does not exist, is not installed, or got what it cannot log."""


def as_numbers(metrics: Mapping[str, Number | Scalar]) -> dict[str, Number]:
    """Plain ints and floats of Python, numpy or torch scalars; anything else is an error."""
    return {clean_text(str(key)): _as_number(key, value) for key, value in metrics.items()}


def _as_number(key: str, value: Number | Scalar) -> Number:
    plain: Number | Scalar = value
    if hasattr(value, "item") and not isinstance(value, int | float):
        with contextlib.suppress(ValueError, TypeError, RuntimeError):  # more than one element
            plain = value.item()
    if isinstance(plain, int):
        return int(plain)
    if isinstance(plain, float):
        return float(plain)
    raise TrackerError(
        f"metric {key!r} is {type(value).__name__} {str(value)[:60]!r}, not a number; "
        "reduce it to one number before logging"
    )


def flatten(tree: Settings, prefix: str = "") -> Iterator[tuple[str, JsonValue]]:
    """`{"a": {"b": 1}}` -> `("a.b", 1)`; lists are leaves."""
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{dotted}.")
        else:
            yield dotted, value


def require(package: str, extra: str) -> ModuleType:
    """Import an optional package, or say how to get it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise TrackerError(
            f"tracker {extra!r} needs the package {package!r} ({error}): "
            f"pip install 'hone-rl[{extra}]', or take {extra!r} out of trainer.logger"
        ) from error
