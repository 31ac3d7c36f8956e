"""The rollout file: every trajectory of a step with everything a replay needs, in a versioned schema.

Parquet, written under a temporary name and renamed. The columns of `SCHEMA` are always there, null where a
run does not have them; reward parts, a score function's extras and an agent loop's `extra_fields` follow.
An extra whose values have no one type (numbers, bool or text) is JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, SupportsInt, TypeVar

import numpy as np
from torch import Tensor

from hone.columns import REWARD_PREFIX
from hone.protocol import DataProto
from hone.text import clean_text, shown
from hone.tokenizer import Tokenizer
from hone.tracking import atomic_path
from hone.types import JsonValue, Row

if TYPE_CHECKING:
    import pyarrow as pa

_T = TypeVar("_T")

SCHEMA_VERSION = 2
SCHEMA_KEY = "hone_rollout_schema"
TEMPORARY_KEY = "hone_temporary"
"""In the metadata of a file that is deleted when newer ones are there."""

_IDS, _MASK, _NUMBERS = "list<int64>", "list<int8>", "list<float>"
SCHEMA: dict[str, str] = {
    "step": "int64",
    "uid": "string",
    "trajectory_id": "string",
    "sample_index": "int64",
    "seed": "uint64",
    "data_source": "string",
    "prompt_text": "string",
    "response_text": "string",
    "turns": "string",
    "prompt_ids": _IDS,
    "response_ids": _IDS,
    "response_mask": _MASK,
    "loss_mask": _MASK,
    "rollout_log_probs": _NUMBERS,
    "old_log_probs": _NUMBERS,
    "ref_log_prob": _NUMBERS,
    "values": _NUMBERS,
    "sum_pi_squared": _NUMBERS,
    "rollout_is_weights": _NUMBERS,
    "token_level_scores": _NUMBERS,
    "token_level_rewards": _NUMBERS,
    "advantages": _NUMBERS,
    "returns": _NUMBERS,
    "versions": _IDS,
    "stop_reason": "string",
    "num_turns": "int64",
    "score": "double",
    "reward_baseline": "double",
    "ground_truth": "string",
    "extra_info": "string",
    "tool_outputs": "string",
    "tool_rewards": "string",
    "reward_scores": "string",
    "turn_scores": "string",
    "timeouts": "string",
}
"""Column to type. Texts of `JSON_COLUMNS` are JSON."""
JSON_COLUMNS = (
    "turns",
    "ground_truth",
    "extra_info",
    "tool_outputs",
    "tool_rewards",
    "reward_scores",
    "turn_scores",
    "timeouts",
)
TURN_SPANS = "turn_spans"
"""The fact by which a loop says who wrote what: `{"role", "tokens", …}` for each turn, in order."""
CLASH_PREFIX = "extra/"
"""Before the name of an extra that has the name of another column of the file."""


def write_rollouts(path: Path, batch: DataProto, tokenizer: Tokenizer, *, step: int) -> None:
    """One row per trajectory."""
    write_table(path, rollout_table(batch, tokenizer, step=step))


def write_table(path: Path, table: pa.Table) -> None:
    import pyarrow.parquet as pq

    with atomic_path(path) as temporary:
        pq.write_table(table, temporary)


def is_temporary(path: Path) -> bool:
    """Whether a file may be deleted when newer ones are there; not one that was asked for, or damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return TEMPORARY_KEY.encode() in (pq.read_schema(path).metadata or {})
    except (pa.ArrowException, OSError):
        return False


def rollout_table(
    batch: DataProto, tokenizer: Tokenizer, *, step: int, temporary: bool = False
) -> pa.Table:
    """The Arrow table of a step in the order of `SCHEMA`, with its version.

    It is made beside the next step: loops in Python, which hold that up, are over rows and not over tokens.
    """
    import pyarrow as pa

    columns = _columns(batch, step)
    _add_extras(columns, batch)
    prompts, responses = (_rows(columns[name]) for name in ("prompt_ids", "response_ids"))
    nothing, mask = [None for _ in prompts], columns["response_mask"]
    masks = nothing if mask.null_count else _rows(mask)
    spans = batch.non_tensor_batch.get(TURN_SPANS, nothing)
    turns = [_turns_as_json(*row, tokenizer) for row in zip(responses, masks, spans, strict=True)]
    columns["prompt_text"] = _texts(_decoded(prompts, tokenizer))
    columns["response_text"] = _texts(_decoded(responses, tokenizer))
    columns["turns"] = _texts(turns)
    names = [*SCHEMA, *(name for name in columns if name not in SCHEMA)]
    metadata = {SCHEMA_KEY: str(SCHEMA_VERSION)} | ({TEMPORARY_KEY: "1"} if temporary else {})
    return pa.table({n: columns[n] for n in names}).replace_schema_metadata(metadata)


def _columns(batch: DataProto, step: int) -> dict[str, pa.Array]:
    """Arrow arrays of the schema, but for texts, and of the reward parts."""
    import pyarrow as pa

    tensors, facts = batch.batch, batch.non_tensor_batch
    rows, nothing = len(batch), [None for _ in range(len(batch))]
    width = tensors["prompts"].shape[1]
    attention = tensors["attention_mask"].cpu().numpy()
    in_prompt = _Places.of(attention[:, :width] != 0)
    length = np.arange(attention.shape[1] - width)
    in_response = _Places.of(length < attention[:, width:].sum(1)[:, None])
    columns: dict[str, pa.Array] = {
        "step": pa.array(np.full(rows, step), pa.int64()),
        "prompt_ids": _ragged(tensors["prompts"], in_prompt, "prompt_ids"),
        "response_ids": _ragged(tensors["responses"], in_response, "response_ids"),
        "score": pa.nulls(rows, pa.float64()),
        "reward_baseline": pa.nulls(rows, pa.float64()),
    }
    if batch.has_column("token_level_scores"):
        columns["score"] = pa.array(_array(tensors["token_level_scores"].sum(-1)).astype(float))
    if batch.has_column("reward_baselines"):
        columns["reward_baseline"] = pa.array(_array(tensors["reward_baselines"]).astype(float))
    truths = [(m or {}).get("ground_truth") for m in facts.get("reward_model", nothing)]
    columns["ground_truth"] = _texts(map(_as_json, truths))
    parts = sorted(n for n in tensors.keys() if n.startswith(REWARD_PREFIX))  # noqa: SIM118
    for name in [*SCHEMA, *parts]:
        if name in columns or name in _DECODED:
            continue
        if batch.has_column(name) and name not in facts:
            columns[name] = _ragged(tensors[name], in_response, name)
        elif name in facts:
            columns[name] = _fact_column(name, facts[name])
        else:
            columns[name] = pa.nulls(rows, _arrow_type(name))
    return columns


def _fact_column(name: str, values: np.ndarray) -> pa.Array:
    import pyarrow as pa

    if name in JSON_COLUMNS:
        # Rows of one prompt share the row's own values: each is written once.
        texts = {id(value): _writable(_as_json(value)) for value in values}
        return pa.array([texts[id(value)] for value in values], pa.string())
    try:
        return pa.array(values, type=_arrow_type(name))
    except (pa.ArrowException, UnicodeError, TypeError, ValueError, OverflowError):
        return pa.array([_value(name, v) for v in values], type=_arrow_type(name))


_DECODED = ("prompt_text", "response_text", "turns")
_MADE_HERE = (
    *_DECODED,
    "step",
    "prompt_ids",
    "response_ids",
    "score",
    "reward_baseline",
    "ground_truth",
)
"""Columns of the schema that are no columns of the batch."""


def _turns_as_json(
    ids: np.ndarray, mask: np.ndarray | None, spans: Sequence[Row] | None, tokenizer: Tokenizer
) -> str | None:
    """The turns of a response; None for a response of one."""
    if spans is None and (mask is None or mask.all()):
        return None
    turns = turns_of(ids, () if mask is None else mask.tolist(), spans, tokenizer)
    return _as_json(turns) if len(turns) > 1 else None


def turns_of(
    ids: np.ndarray, mask: Sequence[int], spans: Sequence[Row] | None, tokenizer: Tokenizer
) -> list[Row]:
    """Who wrote what in a response: the loop's word for it, else what the mask tells."""
    turns, start = [], 0
    for span in _spans_of_loop(spans, len(ids)) or _spans_of_mask(mask):
        end = start + span["tokens"]
        turns.append({**span, "text": tokenizer.decode(ids[start:end])})
        start = end
    return turns


def _spans_of_loop(spans: Sequence[Row] | None, tokens: int) -> list[Row] | None:
    """The spans where they cover the response: a loop of the user's may say anything."""
    if spans is None:
        return None
    try:
        found = [
            {**span, "role": str(span["role"]), "tokens": int(span["tokens"])} for span in spans
        ]
    except (TypeError, ValueError, KeyError):
        return None
    whole = all(span["tokens"] > 0 for span in found) and sum(s["tokens"] for s in found) == tokens
    return found if whole else None


def _spans_of_mask(mask: Sequence[int]) -> list[Row]:
    return [
        {"role": "assistant" if written else "environment", "tokens": len(list(run))}
        for written, run in groupby(mask)
    ]


def _add_extras(columns: dict[str, pa.Array], batch: DataProto) -> None:
    """What the score function and the loops said of each row beyond the schema."""
    import pyarrow as pa

    facts, info = batch.non_tensor_batch, batch.meta_info
    # `score` is what the score function returned: the file has it already.
    of_scorer = (n for n in info.get("reward_extra_names", ()) if n != "score")
    in_the_schema = {TURN_SPANS, *SCHEMA} - set(_MADE_HERE)
    of_loops = (n for n in info.get("loop_facts", ()) if n not in in_the_schema)
    taken = {*columns, *_DECODED}
    for name in dict.fromkeys([*of_scorer, *of_loops]):
        if name not in facts:
            continue
        called = clean_text(str(name))
        called = CLASH_PREFIX + called if called in taken else called
        taken.add(called)
        values = _one_type([_plain(v) for v in facts[name]])
        columns[called] = pa.array([_writable(value) for value in values])


@dataclass(frozen=True)
class _Places:
    """Where the tokens of each row lie in a padded tensor [B, T]."""

    index: np.ndarray
    """Into the flattened tensor."""
    offsets: np.ndarray
    """Of each row's first token among all, and the end."""

    @classmethod
    def of(cls, inside: np.ndarray) -> _Places:
        return cls(np.flatnonzero(inside), np.concatenate([[0], inside.sum(1).cumsum()]))


def _ragged(values: Tensor, places: _Places, name: str) -> pa.ListArray:
    """An Arrow list per row: the values at the places."""
    import pyarrow as pa

    items = pa.array(_array(values).reshape(-1).take(places.index))
    kind = _arrow_type(name)
    return pa.ListArray.from_arrays(
        pa.array(places.offsets, pa.int32()), items.cast(kind.value_type)
    )


def _array(values: Tensor) -> np.ndarray:
    values = values.detach().cpu()
    array: np.ndarray = (values.float() if values.is_floating_point() else values.long()).numpy()
    return array


def _rows(column: pa.ListArray) -> list[np.ndarray]:
    """The rows of a list column as numpy arrays."""
    return np.split(column.flatten().to_numpy(), column.offsets.to_numpy()[1:-1])


def _arrow_type(name: str) -> pa.DataType:
    """The declared type; a reward part is one number per token."""
    import pyarrow as pa

    declared = SCHEMA.get(name, _NUMBERS)
    inner = declared.removeprefix("list<").removesuffix(">")
    plain = pa.type_for_alias(inner)
    return pa.list_(plain) if inner != declared else plain


def _texts(texts: Iterable[str | None]) -> pa.Array:
    import pyarrow as pa

    return pa.array([_writable(text) for text in texts], pa.string())


def _decoded(rows: Sequence[np.ndarray], tokenizer: Tokenizer) -> list[str]:
    """The text of each row; equal rows are decoded once."""
    texts: dict[bytes, str] = {}
    # transformers looks at each number of a list, in Python; an array it takes as it is.
    takes_arrays = getattr(tokenizer, "is_fast", False)
    keys = [ids.tobytes() for ids in rows]
    for key, ids in zip(keys, rows, strict=True):
        if key not in texts:
            texts[key] = tokenizer.decode(ids if takes_arrays else ids.tolist())
    return [texts[key] for key in keys]


def _value(name: str, value: JsonValue | np.generic) -> JsonValue | np.generic:
    if value is None:
        return None
    if SCHEMA.get(name) == "string":
        return clean_text(value if isinstance(value, str) else shown(value))
    if SCHEMA[name].endswith("int64") and isinstance(value, str | SupportsInt):
        return int(value)
    return value


def _as_json(value: JsonValue | list[Row]) -> str | None:
    if value is None:
        return None
    try:
        return json.dumps(value, default=_readable, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        # Keys that are no text, a circle, an integer of thousands of digits: as text at least.
        return json.dumps(hex(value) if isinstance(value, int) else shown(value))


def _readable(value: _T) -> JsonValue:
    if hasattr(value, "tolist"):
        values: JsonValue = value.tolist()
        return values
    try:
        return str(value)
    except Exception:  # the object's own code
        return shown(value)


def _plain(value: JsonValue | np.generic) -> JsonValue:
    return value.item() if isinstance(value, np.generic) else value


def _one_type(values: list[JsonValue]) -> list[JsonValue]:
    """The values of an extra if they are all numbers, all bool or all text; else each as JSON."""
    known = [v for v in values if v is not None]
    if all(isinstance(v, bool) for v in known) or all(isinstance(v, str) for v in known):
        return values
    if all(isinstance(v, int) and not isinstance(v, bool) and -(2**63) <= v < 2**63 for v in known):
        return values
    numbers = [v for v in known if isinstance(v, (int, float)) and not isinstance(v, bool)]
    if len(numbers) == len(known) and all(
        isinstance(v, float) or abs(v) <= 2**53 for v in numbers
    ):  # exact as doubles
        return [float(v) if isinstance(v, (int, float)) else None for v in values]
    return [_as_json(v) for v in values]


def _writable(value: _T) -> _T | str:
    return clean_text(value) if isinstance(value, str) else value
