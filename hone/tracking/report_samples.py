"""Responses for the report, from the parquet files of rollouts and validations.

Files and columns that cannot be read are left out and named in the notes. Scores are read from every
file, texts only where they are needed: a long run stays cheap.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from hone.types import JsonObject, JsonValue

EXTREMES_SHOWN = 5
LARGEST = 1e300
"""Of a number of a turn or tool; NaN and integers beyond a float are no numbers."""
StepFiles = list[tuple[int, Path]]


@dataclass(frozen=True)
class ToolCall:
    """A call that the model made, and what it earned."""

    text: str
    """The name with its arguments."""
    reward: float | None


@dataclass(frozen=True)
class Turn:
    """What one side wrote in a response of several turns."""

    role: str
    text: str
    score: float | None = None
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One response and what it earned."""

    step: int
    uid: str
    prompt: str
    response: str
    score: float | None
    parts: dict[str, float] = field(default_factory=dict)
    """Reward parts by name."""
    turns: tuple[Turn, ...] = ()
    """Empty for a response of one turn."""
    trajectory_scores: dict[str, float] = field(default_factory=dict)
    """What each tool and interaction gave the whole trajectory."""


COLUMNS = (
    "uid",
    "prompt_text",
    "response_text",
    "score",
    "turns",
    "tool_outputs",
    "reward_scores",
)


def read_samples(step: int, path: Path, notes: list[str]) -> list[Sample]:
    """Every row of a file; columns it does not have leave gaps."""
    table = _columns(path, COLUMNS, notes, "reward/")
    count = max((len(column) for column in table.values()), default=0)
    empty: list[JsonValue] = [None] * count
    scores = _numbers(table.get("score", empty), "score", path, notes)
    texts = {
        name: ["" if text is None else str(text) for text in table.get(name, empty)]
        for name in ("uid", "prompt_text", "response_text")
    }
    parts = [name for name in table if name.startswith("reward/")]
    return [
        Sample(
            step=step,
            uid=texts["uid"][row],
            prompt=texts["prompt_text"][row],
            response=texts["response_text"][row],
            score=scores[row],
            parts={
                name.removeprefix("reward/"): total
                for name in parts
                if (total := _total(table[name][row])) is not None
            },
            turns=_turns(table.get("turns", empty)[row], table.get("tool_outputs", empty)[row]),
            trajectory_scores=_scores(table.get("reward_scores", empty)[row]),
        )
        for row in range(count)
    ]


def _turns(turns: JsonValue, outputs: JsonValue) -> tuple[Turn, ...]:
    """The turns of a response, each with the calls it made; what is not of that form is left out."""
    made = [_call(out) for out in _json_list(outputs) if isinstance(out, dict)]
    calls = iter(made)
    return tuple(
        Turn(
            role=str(turn.get("role", "")),
            text=str(turn.get("text", "")),
            score=_number(turn.get("score")),
            calls=tuple(islice(calls, _count(turn.get("calls"), len(made)))),
        )
        for turn in _json_list(turns)
        if isinstance(turn, dict)
    )


def _call(output: JsonObject) -> ToolCall:
    arguments = output.get("arguments")
    named = arguments.items() if isinstance(arguments, dict) else ()
    given = ", ".join(f"{name}={json.dumps(v, ensure_ascii=False)}" for name, v in named)
    return ToolCall(f"{output.get('name', '')}({given})", _number(output.get("reward")))


def _scores(text: JsonValue) -> dict[str, float]:
    value = _json(text)
    named = value.items() if isinstance(value, dict) else ()
    return {name: number for name, v in named if (number := _number(v)) is not None}


def _json_list(text: JsonValue) -> list[JsonValue]:
    value = _json(text)
    return value if isinstance(value, list) else []


def _json(text: JsonValue) -> JsonValue:
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None


def _count(value: JsonValue, most: int) -> int:
    return int(min(max(_number(value) or 0, 0), most))


def _number(value: JsonValue) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) <= LARGEST else None


def extremes(files: StepFiles, notes: list[str]) -> tuple[list[Sample], list[Sample]]:
    """The best and the worst scored responses of a run, one per prompt; of equals, the latest."""
    scores, steps, rows, numbers = [], [], [], []
    for number, (step, path) in enumerate(files):
        table = _columns(path, ("score",), notes)
        found = np.array(_numbers(table.get("score", []), "score", path, notes), np.float64)
        (scored,) = np.nonzero(np.isfinite(found))
        scores.append(found[scored])
        rows.append(scored)
        steps.append(np.full(len(scored), step))
        numbers.append(np.full(len(scored), number))
    if not scores:
        return [], []
    score, step_of, row, file = map(np.concatenate, (scores, steps, rows, numbers))
    prompts = _Prompts(files)
    shown = []
    for sign in (-1, 1):
        order = np.lexsort((row, -step_of, sign * score))
        shown.append(_one_a_prompt(zip(file[order], row[order], strict=True), prompts, notes))
    return shown[0], shown[1]


def _one_a_prompt(
    places: Iterable[tuple[int, int]], prompts: _Prompts, notes: list[str]
) -> list[Sample]:
    """The samples at the first places (file, row) whose prompts differ."""
    taken: dict[str, tuple[int, int]] = {}
    for number, row in places:
        taken.setdefault(prompts.at(number, row), (number, row))
        if len(taken) == EXTREMES_SHOWN:
            break
    samples: dict[int, list[Sample]] = {}
    for number, _ in taken.values():
        if number not in samples:
            samples[number] = read_samples(*prompts.files[number], notes)
    return [samples[number][row] for number, row in taken.values() if row < len(samples[number])]


class _Prompts:
    """The prompt a row answers, by its text: a `uid` is another one in every epoch."""

    def __init__(self, files: StepFiles) -> None:
        self.files = files
        self._of_file: dict[int, list[str]] = {}
        self._texts: dict[str, str] = {}

    def at(self, number: int, row: int) -> str:
        if number not in self._of_file:
            self._of_file[number] = self._read(*self.files[number])
        known = self._of_file[number]
        return known[row] if row < len(known) else f"{number}:{row}"

    def _read(self, step: int, path: Path) -> list[str]:
        table = _columns(path, ("prompt_text", "uid"), [])
        column = table.get("prompt_text") or table.get("uid") or []
        # A text that many rows share is kept once.
        names = (f"{step}:{row}" if text is None else str(text) for row, text in enumerate(column))
        return [self._texts.setdefault(name, name) for name in names]


def _numbers(
    column: Sequence[JsonValue], name: str, path: Path, notes: list[str]
) -> list[float | None]:
    found = [float(value) if isinstance(value, int | float) else None for value in column]
    if sum(value is None for value in found) > sum(value is None for value in column):
        _note(notes, f"{_place(path)}: {name!r} is left out where it is no number")
    return found


def _total(part: JsonValue) -> float | None:
    """A reward part: one number, or one per token."""
    parts = part if isinstance(part, list) else [part]
    numbers = [number for number in parts if isinstance(number, int | float)]
    return float(sum(numbers)) if len(numbers) == len(parts) else None


def _columns(
    path: Path, names: Sequence[str], notes: list[str], prefix: str | None = None
) -> dict[str, list[JsonValue]]:
    """Those of the named columns, and of the prefix, that a file has; none if it is unreadable."""
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(path)
        there = dict.fromkeys(file.schema_arrow.names)
        wanted = [n for n in there if n in names or (prefix is not None and n.startswith(prefix))]
        return file.read(columns=wanted).to_pydict() if wanted else {}
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        _note(notes, f"{_place(path)} cannot be read and is left out: {error}")
        return {}


def _note(notes: list[str], note: str) -> None:
    if note not in notes:
        notes.append(note)


def _place(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"
