"""The rollout file: every trajectory of a step with everything a replay needs, in a fixed schema.

Parquet, written under a temporary name and renamed. The schema's version is in the file's metadata.
A column that a run does not have is there and null; reward parts and a score function's extras follow.
An extra whose values have no one type (numbers, bool or text) is JSON text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from hone.columns import REWARD_PREFIX
from hone.protocol import DataProto
from hone.text import clean_text, shown
from hone.tracking import atomic_path

SCHEMA_VERSION = 1
SCHEMA_KEY = "hone_rollout_schema"

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
    "timeouts": "string",
}
"""Column to type. Texts of ground_truth, extra_info, tool_outputs and timeouts are JSON."""


def write_rollouts(path: Path, batch: DataProto, tokenizer: Any, *, step: int) -> None:
    """One row a trajectory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = rollout_columns(batch, tokenizer, step=step)
    arrays = {name: pa.array(values, type=_arrow_type(name)) for name, values in columns.items()}
    table = pa.table(arrays).replace_schema_metadata({SCHEMA_KEY: str(SCHEMA_VERSION)})
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary)


def _arrow_type(name: str) -> Any:
    """The declared type; reward parts are numbers a token, extras are whatever their values are."""
    import pyarrow as pa

    declared = SCHEMA.get(name, _NUMBERS if name.startswith(REWARD_PREFIX) else None)
    if declared is None:
        return None
    inner = declared.removeprefix("list<").removesuffix(">")
    plain = pa.type_for_alias(inner)
    return pa.list_(plain) if inner != declared else plain


def rollout_columns(batch: DataProto, tokenizer: Any, *, step: int) -> dict[str, list[Any]]:
    """The columns of `SCHEMA`, then reward parts, then extras."""
    columns, facts = batch.batch, batch.non_tensor_batch
    width = columns["prompts"].shape[1]
    prompt_length = columns["attention_mask"][:, :width].sum(1).tolist()
    length = columns["attention_mask"][:, width:].sum(1).tolist()
    rows = range(len(batch))
    prompts = [columns["prompts"][i, width - prompt_length[i] :].tolist() for i in rows]
    responses = [columns["responses"][i, : length[i]].tolist() for i in rows]
    scores = columns["token_level_scores"] if batch.has_column("token_level_scores") else None
    table: dict[str, list[Any]] = {
        "step": [step for _ in rows],
        "prompt_text": [tokenizer.decode(ids) for ids in prompts],
        "response_text": [tokenizer.decode(ids) for ids in responses],
        "prompt_ids": prompts,
        "response_ids": responses,
        "score": scores.sum(-1).tolist() if scores is not None else [None for _ in rows],
        "reward_baseline": [None for _ in rows],
        "ground_truth": [
            _as_json((m or {}).get("ground_truth"))
            for m in facts.get("reward_model", [None for _ in rows])
        ],
    }
    if batch.has_column("reward_baselines"):
        table["reward_baseline"] = columns["reward_baselines"].tolist()
    parts = sorted(n for n in columns.keys() if n.startswith(REWARD_PREFIX))  # noqa: SIM118
    for name in [*SCHEMA, *parts]:
        if name in table:
            continue
        if batch.has_column(name) and name not in facts:
            table[name] = [columns[name][i, : length[i]].tolist() for i in rows]
        else:
            table[name] = [_value(name, v) for v in facts.get(name, [None for _ in rows])]
    ordered = {name: table[name] for name in [*SCHEMA, *parts]}
    for name in batch.meta_info.get("reward_extra_names", []):
        if name in facts:
            values = _one_type([_plain(v) for v in facts[name]])
            ordered.setdefault(clean_text(str(name)), values)
    return {name: [_writable(value) for value in values] for name, values in ordered.items()}


def _value(name: str, value: Any) -> Any:
    if name in ("extra_info", "tool_outputs", "timeouts"):
        return _as_json(value)
    if value is None:
        return None
    if SCHEMA.get(name) == "string":
        return value if isinstance(value, str) else shown(value)
    return int(value) if SCHEMA[name].endswith("int64") else value


def _as_json(value: Any) -> str | None:
    if value is None:
        return None
    try:
        return json.dumps(value, default=_readable, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        # Keys that are no text, a circle, an integer of thousands of digits: as text at least.
        return json.dumps(hex(value) if isinstance(value, int) else shown(value))


def _readable(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    try:
        return str(value)
    except Exception:  # the object's own code
        return shown(value)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _one_type(values: list[Any]) -> list[Any]:
    """The values of an extra if they are all numbers, all bool or all text; else each as JSON."""
    known = [v for v in values if v is not None]
    if all(isinstance(v, bool) for v in known) or all(isinstance(v, str) for v in known):
        return values
    if all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in known):
        if all(isinstance(v, int) and -(2**63) <= v < 2**63 for v in known):
            return values
        if all(isinstance(v, float) or abs(v) <= 2**53 for v in known):  # exact as a double
            return [None if v is None else float(v) for v in values]
    return [_as_json(v) for v in values]


def _writable(value: Any) -> Any:
    return clean_text(value) if isinstance(value, str) else value
