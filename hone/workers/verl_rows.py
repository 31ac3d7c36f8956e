"""The rows of a hand-written loop in verl's manner, as agent loops read them.

verl's loops hand `generate_sequences` prompt tensors or chat messages, and say how to sample in
`meta_info`; uids are optional there.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from hone.agents.sampling import training_sampling, validation_sampling
from hone.config.rollout import RolloutConfig
from hone.controller.modes import Batch, Group, PerRank, split_batches
from hone.protocol import DataProto
from hone.protocol.rows import object_array
from hone.types import Row, Settings

MADE_UID = "made_uid"


def split_numbered(group: Group, prompts: DataProto) -> PerRank[Batch]:
    """Dispatch: rows are named and counted before ranks share them, so that no two have one seed."""
    return split_batches(group, numbered(prompts))


def numbered(prompts: DataProto) -> DataProto:
    """With `prompt_ids`, `uid` and `sample_index` for each row, where the loop gave none."""
    rows = prompts.select()
    facts = dict(rows.non_tensor_batch)
    ids = _prompt_ids(rows)
    if ids is not None:
        facts["prompt_ids"] = object_array(ids)
    if "uid" not in facts:
        texts = ids if ids is not None else facts.get("raw_prompt", range(len(rows)))
        names = [hashlib.blake2b(repr(t).encode(), digest_size=8).hexdigest() for t in texts]
        facts["uid"] = np.array(names, dtype=object)
        rows.meta_info[MADE_UID] = True
    if "sample_index" not in facts:
        seen: Counter[str] = Counter()
        counts = []
        for uid in facts["uid"]:
            counts.append(seen[uid])
            seen[uid] += 1
        facts["sample_index"] = np.array(counts, dtype=object)
    return DataProto(batch=None, non_tensor_batch=facts, meta_info=rows.meta_info)


def in_call(rows: DataProto, call: int) -> DataProto:
    """Uids that we made name the call too: the same prompt is drawn anew by the next one."""
    facts = dict(rows.non_tensor_batch)
    if rows.meta_info.get(MADE_UID):
        facts["uid"] = np.array([f"{uid}-{call}" for uid in facts["uid"]], dtype=object)
    attempts = zip(facts["uid"], facts["sample_index"], strict=True)
    facts["trajectory_id"] = np.array([f"{uid}-{i}" for uid, i in attempts], dtype=object)
    return DataProto(batch=None, non_tensor_batch=facts, meta_info=dict(rows.meta_info))


def sampling_of(meta_info: Settings, rollout: RolloutConfig) -> Row:
    """`sampling_params` where they are given, else what `validate` and `do_sample` say."""
    if "sampling_params" in meta_info:
        return dict(meta_info["sampling_params"])
    sampling = (validation_sampling if meta_info.get("validate") else training_sampling)(rollout)
    return sampling if meta_info.get("do_sample", True) else sampling | {"temperature": 0.0}


def _prompt_ids(rows: DataProto) -> list[list[int]] | None:
    facts = rows.non_tensor_batch
    for name in ("prompt_ids", "raw_prompt_ids"):
        if name in facts:
            return [list(ids) for ids in facts[name]]
    for name in ("input_ids", "prompts"):
        if rows.has_column(name) and rows.has_column("attention_mask"):
            return _without_padding(
                rows.batch[name].tolist(), rows.batch["attention_mask"].tolist()
            )
    return None


def _without_padding(ids: Sequence[list[int]], masks: Sequence[list[int]]) -> list[list[int]]:
    return [
        [token for token, seen in zip(row, mask, strict=False) if seen]
        for row, mask in zip(ids, masks, strict=True)
    ]
