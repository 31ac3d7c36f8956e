"""The rollout file: every trajectory of a step with everything a replay needs, in a fixed schema.

Parquet, written under a temporary name and renamed. The schema's version is in the file's metadata.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from hone.columns import REWARD_PREFIX
from hone.protocol import DataProto
from hone.tracking import atomic_path

SCHEMA_VERSION = 1


def write_rollouts(path: Path, batch: DataProto, tokenizer: Any, *, step: int) -> None:
    """One row a trajectory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(rollout_columns(batch, tokenizer, step=step))
    table = table.replace_schema_metadata({"hone_rollout_schema": str(SCHEMA_VERSION)})
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary)


def rollout_columns(batch: DataProto, tokenizer: Any, *, step: int) -> dict[str, list[Any]]:
    columns, facts = batch.batch, batch.non_tensor_batch
    width = columns["prompts"].shape[1]
    prompt_length = columns["attention_mask"][:, :width].sum(1).tolist()
    length = columns["attention_mask"][:, width:].sum(1).tolist()
    rows = range(len(batch))
    prompts = [columns["prompts"][i, width - prompt_length[i] :].tolist() for i in rows]
    responses = [columns["responses"][i, : length[i]].tolist() for i in rows]
    names = set(columns.keys())

    def per_token(name: str) -> list[Any]:
        if name not in names:
            return [None for _ in rows]
        return [columns[name][i, : length[i]].tolist() for i in rows]

    def fact(name: str) -> list[Any]:
        return list(facts[name]) if name in facts else [None for _ in rows]

    table: dict[str, list[Any]] = {
        "step": [step for _ in rows],
        "uid": fact("uid"),
        "trajectory_id": fact("trajectory_id"),
        "sample_index": [None if v is None else int(v) for v in fact("sample_index")],
        "data_source": fact("data_source"),
        "prompt_text": [tokenizer.decode(ids) for ids in prompts],
        "response_text": [tokenizer.decode(ids) for ids in responses],
        "prompt_ids": prompts,
        "response_ids": responses,
        "response_mask": per_token("response_mask"),
        "rollout_log_probs": per_token("rollout_log_probs"),
        "old_log_probs": per_token("old_log_probs"),
        "ref_log_prob": per_token("ref_log_prob"),
        "values": per_token("values"),
        "advantages": per_token("advantages"),
        "versions": fact("versions"),
        "stop_reason": fact("stop_reason"),
        "num_turns": [None if v is None else int(v) for v in fact("num_turns")],
        "score": _row_sums(batch, "token_level_scores"),
        "token_level_scores": per_token("token_level_scores"),
        "token_level_rewards": per_token("token_level_rewards"),
        "ground_truth": [_as_json((m or {}).get("ground_truth")) for m in fact("reward_model")],
        "tool_outputs": [_as_json(v) for v in fact("tool_outputs")],
        "timeouts": [_as_json(v) for v in fact("timeouts")],
    }
    for name in sorted(n for n in names if n.startswith(REWARD_PREFIX)):
        table[name] = per_token(name)
    for name in batch.meta_info.get("reward_extra_names", []):
        table.setdefault(name, [_plain(v) for v in facts[name]])
    return table


def _row_sums(batch: DataProto, name: str) -> list[float | None]:
    if not batch.has_column(name):
        return [None] * len(batch)
    return batch.batch[name].sum(-1).tolist()


def _as_json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, default=str, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return value if isinstance(value, (int, float, str, bool, type(None))) else _as_json(value)
