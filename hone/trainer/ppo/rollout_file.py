"""Writes the trajectories of a step, with everything a replay needs, to a parquet file.

The columns of `SCHEMA` always exist, and are null if a run does not have them. Reward parts, the extras of
the score function and the `extra_fields` of the agent loop follow; an extra whose values are not all
numbers, all bools or all text is stored as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from torch import Tensor

from hone.agents.collate import trajectory_indices, trajectory_totals
from hone.columns import REWARD_PREFIX
from hone.protocol import DataProto
from hone.text import clean_text, short_repr
from hone.tokenizer import Tokenizer
from hone.tracking import atomic_path
from hone.trainer.ppo.credit import split_attention_mask
from hone.types import Fields, JsonValue, Row

if TYPE_CHECKING:
    import pyarrow as pa

_T = TypeVar("_T")

SCHEMA_VERSION = 2
SCHEMA_KEY = "hone_rollout_schema"
TEMPORARY_KEY = "hone_temporary"
"""Metadata key of a file that is deleted once newer files exist."""

_NUMBERS_TYPE = "list<float>"
_FIELDS = """
    step:int64 uid:string trajectory_id:string sample_index:int64 seed:uint64 data_source:string
    prompt_text:string response_text:string turns:string
    prompt_ids:list<int64> response_ids:list<int64> response_mask:list<int8> loss_mask:list<int8>
    rollout_log_probs:list<float> old_log_probs:list<float> ref_log_prob:list<float> values:list<float>
    sum_pi_squared:list<float> rollout_is_weights:list<float>
    token_level_scores:list<float> token_level_rewards:list<float>
    advantages:list<float> returns:list<float> versions:list<int64>
    stop_reason:string num_turns:int64 score:double reward_baseline:double
    ground_truth:string extra_info:string tool_outputs:string tool_rewards:string
    reward_scores:string turn_scores:string timeouts:string
"""
SCHEMA: dict[str, str] = dict(field.split(":") for field in _FIELDS.split())
"""The Arrow type of each column; the strings of `JSON_COLUMNS` are JSON."""
JSON_COLUMNS = (
    *("turns", "ground_truth", "extra_info", "tool_outputs", "tool_rewards"),
    *("reward_scores", "turn_scores", "timeouts"),
)
TURN_SPANS = "turn_spans"
"""The column in which an agent loop lists its turns, each as `{"role", "tokens", …}`."""
CLASH_PREFIX = "extra/"
"""Prefix for an extra whose name is already a column of the file."""

_SAMPLE_COLUMNS = ("data_source", "prompt_text", "response_text", "ground_truth", "score")
_DECODED_COLUMNS = ("prompt_text", "response_text", "turns")
_NOT_IN_BATCH = (
    *_DECODED_COLUMNS,
    *("step", "prompt_ids", "response_ids", "score", "reward_baseline", "ground_truth"),
)
"""Columns of the schema that are not columns of the batch."""


def write_rollouts(
    path: Path, batch: DataProto, tokenizer: Tokenizer, *, step: int, temporary: bool = False
) -> None:
    """Writes the trajectories of a step; a temporary file may be deleted once newer files exist."""
    import pyarrow.parquet as pq

    table = rollout_table(batch, tokenizer, step=step, temporary=temporary)
    with atomic_path(path) as temporary_path:
        pq.write_table(table, temporary_path)


def is_temporary(path: Path) -> bool:
    """Returns whether a file is marked as temporary; False for a damaged file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return TEMPORARY_KEY.encode() in (pq.read_schema(path).metadata or {})
    except (pa.ArrowException, OSError):
        return False


def sample_rows(batch: DataProto, tokenizer: Tokenizer, count: int) -> list[Row]:
    """Returns the first `count` rows as text, for trackers that show tables."""
    first_rows = batch.select_idxs(list(range(min(count, len(batch)))))
    rows: list[Row] = (
        rollout_table(first_rows, tokenizer, step=0).select(_SAMPLE_COLUMNS).to_pylist()
    )
    return rows


def rollout_table(
    batch: DataProto, tokenizer: Tokenizer, *, step: int, temporary: bool = False
) -> pa.Table:
    """Returns the Arrow table of a step, with its columns in the order of `SCHEMA`.

    The table is built while the next step runs, so Python loops are over rows, never over tokens.
    """
    import pyarrow as pa

    columns = _batch_columns(batch, step)
    _add_extras(columns, batch)
    prompts, responses, masks = (
        _split_rows(columns[name]) for name in ("prompt_ids", "response_ids", "response_mask")
    )
    row_spans = batch.non_tensor_batch.get(TURN_SPANS, [None for _ in prompts])
    turn_texts = []
    for ids, mask, spans in zip(responses, masks, row_spans, strict=True):
        has_turns = spans is not None or not mask.all()
        turns = split_turns(ids, mask.tolist(), spans, tokenizer) if has_turns else []
        turn_texts.append(_as_json(turns) if len(turns) > 1 else None)
    columns["prompt_text"] = _text_array(_decode_rows(prompts, tokenizer))
    columns["response_text"] = _text_array(_decode_rows(responses, tokenizer))
    columns["turns"] = _text_array(turn_texts)
    names = [*SCHEMA, *(name for name in columns if name not in SCHEMA)]
    metadata = {SCHEMA_KEY: str(SCHEMA_VERSION)} | ({TEMPORARY_KEY: "1"} if temporary else {})
    return pa.table({name: columns[name] for name in names}).replace_schema_metadata(metadata)


def _batch_columns(batch: DataProto, step: int) -> dict[str, pa.Array]:
    """Returns the columns of the reward parts and of the schema, without the decoded texts."""
    import pyarrow as pa

    tensors, arrays = batch.batch, batch.non_tensor_batch
    num_rows = len(batch)
    is_prompt, is_attended = (part.cpu().numpy() != 0 for part in split_attention_mask(batch))
    is_response = np.arange(is_attended.shape[1]) < is_attended.sum(1)[:, None]
    columns: dict[str, pa.Array] = {
        "step": pa.array(np.full(num_rows, step), pa.int64()),
        "prompt_ids": _list_array(tensors["prompts"], is_prompt, "prompt_ids"),
        "response_ids": _list_array(tensors["responses"], is_response, "response_ids"),
        "score": pa.nulls(num_rows, pa.float64()),
        "reward_baseline": pa.nulls(num_rows, pa.float64()),
    }
    if batch.has_column("token_level_scores"):
        scores = trajectory_totals(batch, tensors["token_level_scores"].sum(-1))
        row_trajectories = trajectory_indices(batch)
        scores = scores if row_trajectories is None else scores[row_trajectories]
        columns["score"] = pa.array(_to_numpy(scores).astype(float))
    if batch.has_column("reward_baselines"):
        columns["reward_baseline"] = pa.array(_to_numpy(tensors["reward_baselines"]).astype(float))
    reward_models = arrays.get("reward_model", [None] * num_rows)
    truths = [(reward_model or {}).get("ground_truth") for reward_model in reward_models]
    columns["ground_truth"] = _text_array(map(_as_json, truths))
    reward_columns = sorted(n for n in tensors.keys() if n.startswith(REWARD_PREFIX))  # noqa: SIM118
    for name in [*SCHEMA, *reward_columns]:
        if name in columns or name in _DECODED_COLUMNS:
            continue
        if name in arrays:
            columns[name] = _array_column(name, arrays[name])
        elif batch.has_column(name):
            columns[name] = _list_array(tensors[name], is_response, name)
        else:
            columns[name] = pa.nulls(num_rows, _arrow_type(name))
    return columns


def _array_column(name: str, values: np.ndarray) -> pa.Array:
    import pyarrow as pa

    arrow_type = _arrow_type(name)
    if name in JSON_COLUMNS:
        # Responses to one prompt share value objects, so each object is serialized once.
        texts = {id(value): _clean(_as_json(value)) for value in values}
        return pa.array([texts[id(value)] for value in values], arrow_type)
    try:
        return pa.array(values, type=arrow_type)
    except (pa.ArrowException, UnicodeError, TypeError, ValueError, OverflowError):
        if SCHEMA[name] == "string":
            return _text_array(v if isinstance(v, str | None) else short_repr(v) for v in values)
        return pa.array([None if v is None else int(v) for v in values], type=arrow_type)


def split_turns(
    ids: np.ndarray, mask: Sequence[int], spans: Sequence[Fields] | None, tokenizer: Tokenizer
) -> list[Fields]:
    """Splits a response into turns: by `spans` if the spans cover the response exactly, else by `mask`."""
    try:
        turns = [
            {**span, "role": str(span["role"]), "tokens": int(span["tokens"])}
            for span in spans or ()
        ]
    except (TypeError, ValueError, KeyError):  # a user's loop may return anything
        turns = []
    counts = [turn["tokens"] for turn in turns]
    if not turns or min(counts) <= 0 or sum(counts) != len(ids):
        turns = [
            {"role": "assistant" if is_policy else "environment", "tokens": len(list(run))}
            for is_policy, run in groupby(mask)
        ]
    start = 0
    for turn in turns:
        end = start + turn["tokens"]
        turn["text"] = tokenizer.decode(ids[start:end])
        start = end
    return turns


def _add_extras(columns: dict[str, pa.Array], batch: DataProto) -> None:
    """Adds the extra columns that the score function and the agent loops returned."""
    import pyarrow as pa

    arrays, info = batch.non_tensor_batch, batch.meta_info
    # The schema already has a column `score`.
    scorer_names = (name for name in info.get("reward_extra_names", ()) if name != "score")
    schema_names = {TURN_SPANS, *SCHEMA} - set(_NOT_IN_BATCH)
    loop_names = (name for name in info.get("loop_columns", ()) if name not in schema_names)
    names = {*columns, *_DECODED_COLUMNS}
    for name in dict.fromkeys([*scorer_names, *loop_names]):
        if name not in arrays:
            continue
        column_name = clean_text(str(name))
        column_name = CLASH_PREFIX + column_name if column_name in names else column_name
        names.add(column_name)
        values = [v.item() if isinstance(v, np.generic) else v for v in arrays[name]]
        columns[column_name] = pa.array(map(_clean, _to_one_type(values)))


def _list_array(values: Tensor, is_inside: np.ndarray, name: str) -> pa.ListArray:
    """Returns one Arrow list per row with the values where `is_inside` [B, T] is true."""
    import pyarrow as pa

    items = pa.array(_to_numpy(values).reshape(-1).take(np.flatnonzero(is_inside)))
    offsets = pa.array(np.concatenate([[0], is_inside.sum(1).cumsum()]), pa.int32())
    return pa.ListArray.from_arrays(offsets, items.cast(_arrow_type(name).value_type))


def _split_rows(column: pa.ListArray) -> list[np.ndarray]:
    return np.split(column.flatten().to_numpy(), column.offsets.to_numpy()[1:-1])


def _to_numpy(values: Tensor) -> np.ndarray:
    """Returns a float32 or int64 array, since NumPy has no bfloat16."""
    values = values.detach().cpu()
    array: np.ndarray = (values.float() if values.is_floating_point() else values.long()).numpy()
    return array


def _arrow_type(name: str) -> pa.DataType:
    """Returns the type in `SCHEMA`; a reward part has one number per token."""
    import pyarrow as pa

    type_name = SCHEMA.get(name, _NUMBERS_TYPE)
    item_name = type_name.removeprefix("list<").removesuffix(">")
    item_type = pa.type_for_alias(item_name)
    return pa.list_(item_type) if item_name != type_name else item_type


def _text_array(texts: Iterable[str | None]) -> pa.Array:
    import pyarrow as pa

    return pa.array([_clean(text) for text in texts], pa.string())


def _decode_rows(rows: Sequence[np.ndarray], tokenizer: Tokenizer) -> list[str]:
    """Decodes each row; equal rows are decoded once."""
    texts: dict[bytes, str] = {}
    # transformers checks each number of a list in Python, but not of an array.
    takes_arrays = getattr(tokenizer, "is_fast", False)
    keys = [ids.tobytes() for ids in rows]
    for key, ids in zip(keys, rows, strict=True):
        if key not in texts:
            texts[key] = tokenizer.decode(ids if takes_arrays else ids.tolist())
    return [texts[key] for key in keys]


def _as_json(value: JsonValue | list[Fields]) -> str | None:
    """Returns the value as JSON; None remains None, a null of the column."""
    if value is None:
        return None
    try:
        return json.dumps(value, default=_json_default, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        # Non-string keys, cycles and huge integers are stored as text.
        return json.dumps(hex(value) if isinstance(value, int) else short_repr(value))


def _json_default(value: _T) -> JsonValue:
    try:
        json_value: JsonValue = value.tolist() if hasattr(value, "tolist") else str(value)
    except Exception:  # a user's object may raise anything
        return short_repr(value)
    return json_value


def _to_one_type(values: list[JsonValue]) -> list[JsonValue]:
    """Converts the values of an extra to JSON text, unless all are bools, all text or all numbers."""
    present_values = [v for v in values if v is not None]
    if any(all(isinstance(v, kind) for v in present_values) for kind in (bool, str)):
        return values
    numbers = [v for v in present_values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(present_values):
        return [_as_json(v) for v in values]
    if all(isinstance(n, int) and -(2**63) <= n < 2**63 for n in numbers):
        return values
    # As float64, floats and integers up to 2^53 are exact.
    if all(isinstance(n, float) or abs(n) <= 2**53 for n in numbers):
        return [float(v) if isinstance(v, int | float) else None for v in values]
    return [_as_json(v) for v in values]


def _clean(value: _T) -> _T | str:
    return clean_text(value) if isinstance(value, str) else value
