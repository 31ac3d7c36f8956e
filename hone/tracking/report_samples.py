"""Reads responses for the report from the parquet files of rollouts and validations."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from hone.types import JsonObject, JsonValue

EXTREMES_SHOWN = 5
MAX_NUMBER = 1e300
"""In a turn or a tool call, NaN or a number beyond ± this limit counts as missing."""
StepFiles = list[tuple[int, Path]]
"""Step and path of each file."""
SortKey = tuple[float, int, int, int]
"""Signed score, negated step, row index and file index of a response; the lowest key is first."""
JSON_COLUMNS = ("turns", "tool_outputs", "reward_scores")
COLUMNS = ("uid", "prompt_text", "response_text", "score", "ground_truth", *JSON_COLUMNS)


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the model: the tool's name with the arguments, and the reward of the call."""

    text: str
    reward: float | None


@dataclass(frozen=True)
class Turn:
    """One turn or observation of a response with several turns."""

    role: str
    text: str
    score: float | None = None
    calls: tuple[ToolCall, ...] = ()
    reward: float | None = None
    """Reward from tools and interactions."""
    tokens: float | None = None
    is_trained_on: bool = True
    """Whether the loss mask of the tokens is 1."""


@dataclass(frozen=True)
class Sample:
    """One response and its score."""

    step: int
    uid: str
    prompt: str
    response: str
    score: float | None
    expected: str = ""
    """The ground truth; empty if the row has none."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    turns: tuple[Turn, ...] = ()
    """Empty for a response of one turn."""
    trajectory_scores: dict[str, float] = field(default_factory=dict)
    """The score of each tool and interaction for the whole trajectory."""


def read_samples(step: int, path: Path, notes: list[str]) -> list[Sample]:
    """Reads every row of a file; values of missing columns are empty."""
    table = _read_columns(path, COLUMNS, notes, "reward/")
    num_rows = max(map(len, table.values()), default=0)
    scores = _parse_scores(table.get("score", [None] * num_rows), path, notes)
    samples = []
    for index in range(num_rows):
        row = {name: column[index] for name, column in table.items()}
        turns, tool_outputs, trajectory_scores = (
            _parse_json(row.get(name)) for name in JSON_COLUMNS
        )
        uid, prompt, response = (
            "" if row.get(name) is None else str(row[name]) for name in COLUMNS[:3]
        )
        reward_parts: dict[str, float | None] = {}
        for name, part in row.items():
            if name.startswith("reward/"):  # one number, or one number per token
                parts = part if isinstance(part, list) else [part]
                numbers = [number for number in parts if isinstance(number, int | float)]
                is_valid = len(numbers) == len(parts)
                reward_parts[name.removeprefix("reward/")] = sum(numbers) if is_valid else None
        sample = Sample(
            *(step, uid, prompt, response, scores[index]),
            _expected(row.get("ground_truth")),
            reward_parts=_numbers(reward_parts),
            turns=_parse_turns(turns, tool_outputs),
            trajectory_scores=_numbers(trajectory_scores),
        )
        samples.append(sample)
    return samples


def _parse_turns(turns: JsonValue, tool_outputs: JsonValue) -> tuple[Turn, ...]:
    """Parses the turns of a response with their tool calls; malformed values are skipped."""
    tool_calls: list[ToolCall] = []
    for output in _objects(tool_outputs):
        arguments = output.get("arguments")
        items = arguments.items() if isinstance(arguments, dict) else ()
        text = ", ".join(f"{name}={json.dumps(item, ensure_ascii=False)}" for name, item in items)
        tool_calls.append(
            ToolCall(f"{output.get('name', '')}({text})", _number(output.get("reward")))
        )
    remaining_calls = iter(tool_calls)
    parsed_turns = []
    for turn in _objects(turns):
        num_calls = int(min(max(_number(turn.get("calls")) or 0, 0), len(tool_calls)))
        turn_calls = tuple(islice(remaining_calls, num_calls))
        score, reward, tokens = (_number(turn.get(name)) for name in ("score", "reward", "tokens"))
        is_trained_on = turn.get("mask", turn.get("role") == "assistant") in (1, True)
        role, text = str(turn.get("role", "")), str(turn.get("text", ""))
        parsed_turns.append(Turn(role, text, score, turn_calls, reward, tokens, is_trained_on))
    return tuple(parsed_turns)


def _expected(ground_truth: JsonValue) -> str:
    """Returns the ground truth, which is stored as JSON, as text: a JSON string without its quotes."""
    truth = _parse_json(ground_truth)
    if truth is None:
        return ""
    return truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False)


def _parse_json(text: JsonValue) -> JsonValue:
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None


def _objects(value: JsonValue) -> list[JsonObject]:
    """Returns the JSON objects of a list; empty for a value that is not a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _numbers(value: JsonValue | dict[str, float | None]) -> dict[str, float]:
    """Returns the numbers of a mapping; empty for a value that is not a mapping."""
    items = value.items() if isinstance(value, dict) else ()
    numbers = {name: _number(item) for name, item in items}
    return {name: number for name, number in numbers.items() if number is not None}


def _number(value: JsonValue) -> float | None:
    """Returns the value as float; None if it is not a number, NaN or beyond MAX_NUMBER."""
    return float(value) if isinstance(value, int | float) and abs(value) <= MAX_NUMBER else None


def best_and_worst(files: StepFiles, notes: list[str]) -> tuple[list[Sample], list[Sample]]:
    """Returns the best and the worst responses of a run, one per prompt; of equal scores, the latest."""
    best: dict[int, SortKey] = {}
    worst: dict[int, SortKey] = {}
    for file_index, (step, path) in enumerate(files):
        table = _read_columns(path, ("score", "prompt_text", "uid"), notes)
        if "score" not in table:
            continue
        scores = _parse_scores(table["score"], path, notes)
        # Prompts are compared by their text, because a `uid` changes with every epoch.
        prompts = table.get("prompt_text") or table.get("uid") or [None] * len(scores)
        for row_index, (score, prompt) in enumerate(zip(scores, prompts, strict=True)):
            if score is None or not math.isfinite(score):
                continue
            prompt_hash = hash((file_index, row_index) if prompt is None else str(prompt))
            for sort_keys, sign in ((best, -1), (worst, 1)):
                sort_key = (sign * score, -step, row_index, file_index)
                sort_keys[prompt_hash] = min(sort_keys.get(prompt_hash, sort_key), sort_key)
    best_keys = heapq.nsmallest(EXTREMES_SHOWN, best.values())
    worst_keys = heapq.nsmallest(EXTREMES_SHOWN, worst.values())
    indices = {file_index for *_, file_index in (*best_keys, *worst_keys)}
    samples = {index: read_samples(*files[index], notes) for index in indices}

    def samples_of(sort_keys: list[SortKey]) -> list[Sample]:
        return [samples[file_index][row_index] for *_, row_index, file_index in sort_keys]

    return samples_of(best_keys), samples_of(worst_keys)


def _parse_scores(column: Sequence[JsonValue], path: Path, notes: list[str]) -> list[float | None]:
    scores = [float(value) if isinstance(value, int | float) else None for value in column]
    if scores.count(None) > list(column).count(None):
        name = f"{path.parent.name}/{path.name}"
        _add_note(notes, f"{name}: 'score' is skipped where it is not a number")
    return scores


def _read_columns(
    path: Path, names: Sequence[str], notes: list[str], prefix: str | None = None
) -> dict[str, list[JsonValue]]:
    """Returns the columns whose name is in `names` or has `prefix`; {} if the file is unreadable."""
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(path)
        all_names = dict.fromkeys(file.schema_arrow.names)
        column_names = [n for n in all_names if n in names or (prefix and n.startswith(prefix))]
        return file.read(columns=column_names).to_pydict() if column_names else {}
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        _add_note(notes, f"{path.parent.name}/{path.name} cannot be read and is skipped: {error}")
        return {}


def _add_note(notes: list[str], note: str) -> None:
    if note not in notes:
        notes.append(note)
