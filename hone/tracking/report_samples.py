"""Responses for the report, from the parquet files of rollouts and validations.

Files and columns that cannot be read are left out and named in the notes. Scores are read from every
file, texts only where they are shown, so that a long run stays cheap.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hone.types import JsonObject, JsonValue

EXTREMES_SHOWN = 5
LARGEST = 1e300
"""Larger numbers of a turn or tool, and NaN, count as absent."""
StepFiles = list[tuple[int, Path]]
JSON_COLUMNS = ("turns", "tool_outputs", "reward_scores")
COLUMNS = ("uid", "prompt_text", "response_text", "score", *JSON_COLUMNS)


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the model: its name with arguments, and its reward."""

    text: str
    reward: float | None


@dataclass(frozen=True)
class Turn:
    """One turn of a response of several turns."""

    role: str
    text: str
    score: float | None = None
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One response and its score."""

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
    """The score of each tool and interaction for the whole trajectory."""


def read_samples(step: int, path: Path, notes: list[str]) -> list[Sample]:
    """Every row of a file; a column that the file does not have is empty."""
    table = _columns(path, COLUMNS, notes, "reward/")
    count = max(map(len, table.values()), default=0)
    scores = _scores(table.get("score", [None] * count), path, notes)
    samples = []
    for number in range(count):
        row = {name: column[number] for name, column in table.items()}
        turns, outputs, rewards = (_parsed(row.get(name)) for name in JSON_COLUMNS)
        texts = ["" if row.get(name) is None else str(row[name]) for name in COLUMNS[:3]]
        parts = {n.removeprefix("reward/"): _total(v) for n, v in row.items() if n[:7] == "reward/"}
        samples.append(
            Sample(
                step=step,
                uid=texts[0],
                prompt=texts[1],
                response=texts[2],
                score=scores[number],
                parts=_numbers(parts),
                turns=_turns(turns, outputs),
                trajectory_scores=_numbers(rewards),
            )
        )
    return samples


def _turns(turns: JsonValue, outputs: JsonValue) -> tuple[Turn, ...]:
    """The turns of a response, each with its tool calls; values of another form are left out."""
    made = [_call(output) for output in _objects(outputs)]
    calls = iter(made)
    return tuple(
        Turn(
            role=str(turn.get("role", "")),
            text=str(turn.get("text", "")),
            score=_number(turn.get("score")),
            calls=tuple(
                islice(calls, int(min(max(_number(turn.get("calls")) or 0, 0), len(made))))
            ),
        )
        for turn in _objects(turns)
    )


def _call(output: JsonObject) -> ToolCall:
    arguments = output.get("arguments")
    named = arguments.items() if isinstance(arguments, dict) else ()
    listed = ", ".join(f"{name}={json.dumps(v, ensure_ascii=False)}" for name, v in named)
    return ToolCall(f"{output.get('name', '')}({listed})", _number(output.get("reward")))


def _parsed(text: JsonValue) -> JsonValue:
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None


def _objects(value: JsonValue) -> list[JsonObject]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _numbers(value: JsonValue | dict[str, float | None]) -> dict[str, float]:
    named = value.items() if isinstance(value, dict) else ()
    return {name: number for name, v in named if (number := _number(v)) is not None}


def _number(value: JsonValue) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) <= LARGEST else None


def _total(part: JsonValue) -> float | None:
    """A reward part: one number, or one per token."""
    parts = part if isinstance(part, list) else [part]
    numbers = [number for number in parts if isinstance(number, int | float)]
    return float(sum(numbers)) if len(numbers) == len(parts) else None


def extremes(files: StepFiles, notes: list[str]) -> tuple[list[Sample], list[Sample]]:
    """The best and the worst scored responses of a run, one per prompt; of equals, the latest."""
    found = [np.empty((4, 0))]
    for number, (step, path) in enumerate(files):
        column = _columns(path, ("score",), notes).get("score", [])
        scores = np.array(_scores(column, path, notes), np.float64)
        (rows,) = np.nonzero(np.isfinite(scores))
        like = np.ones(len(rows))
        found.append(np.stack([scores[rows], step * like, rows, number * like]))
    score, steps, row, file = np.concatenate(found, axis=1)
    prompts = _Prompts(files)
    best, worst = (
        _one_per_prompt(np.stack([file, row])[:, order].T.astype(int), prompts, notes)
        for order in (np.lexsort((row, -steps, sign * score)) for sign in (-1, 1))
    )
    return best, worst


def _one_per_prompt(places: NDArray[np.int64], prompts: _Prompts, notes: list[str]) -> list[Sample]:
    """The samples at the first places (file, row) whose prompts differ."""
    firsts: dict[str, tuple[int, int]] = {}
    for number, row in places:
        firsts.setdefault(prompts.at(number, row), (number, row))
        if len(firsts) == EXTREMES_SHOWN:
            break
    files = {number for number, _ in firsts.values()}
    samples = {number: read_samples(*prompts.files[number], notes) for number in files}
    return [samples[number][row] for number, row in firsts.values() if row < len(samples[number])]


class _Prompts:
    """The prompt of a row, by its text: a `uid` is another one in every epoch."""

    def __init__(self, files: StepFiles) -> None:
        self.files = files
        self._of_file: dict[int, list[str]] = {}
        self._texts: dict[str, str] = {}

    def at(self, number: int, row: int) -> str:
        if number not in self._of_file:
            step, path = self.files[number]
            table = _columns(path, ("prompt_text", "uid"), [])
            column = table.get("prompt_text") or table.get("uid") or []
            names = (f"{step}:{i}" if text is None else str(text) for i, text in enumerate(column))
            # A text that many rows share is stored once.
            self._of_file[number] = [self._texts.setdefault(name, name) for name in names]
        prompts = self._of_file[number]
        return prompts[row] if row < len(prompts) else f"{number}:{row}"


def _scores(column: Sequence[JsonValue], path: Path, notes: list[str]) -> list[float | None]:
    scores = [float(value) if isinstance(value, int | float) else None for value in column]
    if scores.count(None) > list(column).count(None):
        _note(notes, f"{path.parent.name}/{path.name}: 'score' is left out where it is no number")
    return scores


def _columns(
    path: Path, names: Sequence[str], notes: list[str], prefix: str | None = None
) -> dict[str, list[JsonValue]]:
    """Those of the named columns, and of the prefix, that a file has; none if it is unreadable."""
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(path)
        present = dict.fromkeys(file.schema_arrow.names)
        columns = [n for n in present if n in names or (prefix and n.startswith(prefix))]
        return file.read(columns=columns).to_pydict() if columns else {}
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        _note(notes, f"{path.parent.name}/{path.name} cannot be read and is left out: {error}")
        return {}


def _note(notes: list[str], note: str) -> None:
    if note not in notes:
        notes.append(note)
