"""Joins batches with prompts and responses of different widths, of several ranks or of several steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from hone.agents.collate import (
    LOOP_SCORE_COLUMN,
    NOT_RECORDED,
    check_all_or_none,
    fill_object_columns,
)
from hone.protocol import DataProto


def join_ranks(_worker_group: object, results: Sequence[DataProto]) -> DataProto:
    """Concatenates the batches that the ranks of a worker group collated; it is called as a `collect_fn`.

    A column that only some ranks have is filled with None, and `routed_experts` with NOT_RECORDED;
    `rollout_log_probs` that only some ranks have are dropped.
    """
    batches = fill_object_columns(results)
    check_all_or_none(sum(batch.has_column(LOOP_SCORE_COLUMN) for batch in batches), len(batches))
    if not all(batch.has_column("rollout_log_probs") for batch in batches):
        for batch in batches:
            batch.batch.pop("rollout_log_probs", None)
    recorded_experts = [
        batch.batch["routed_experts"] for batch in batches if batch.has_column("routed_experts")
    ]
    for batch in batches if recorded_experts else ():
        if not batch.has_column("routed_experts"):
            shape = (*batch.batch["attention_mask"].shape, *recorded_experts[0].shape[2:])
            batch.batch["routed_experts"] = recorded_experts[0].new_full(shape, NOT_RECORDED)
    return DataProto.concat(pad_to_equal_widths(batches))


def pad_and_concat(batches: Sequence[DataProto]) -> DataProto:
    """Pads batches to the largest width and concatenates them; the masks are 0 at padding.

    A column that some batches lack is filled with None if an agent loop wrote it, and dropped if a
    reward function wrote it.
    """
    reward_columns = {
        name for batch in batches for name in batch.meta_info.get("reward_extra_names", [])
    }
    padded_batches = fill_object_columns(pad_to_equal_widths(batches), skip_columns=reward_columns)
    common_columns = set.intersection(*(set(batch.column_names()) for batch in padded_batches))
    selected_batches = [
        batch.select(
            batch_keys=[name for name in batch.batch.keys() if name in common_columns],  # noqa: SIM118
            non_tensor_batch_keys=[
                name for name in batch.non_tensor_batch if name in common_columns
            ],
            meta_info_keys=[],
        )
        for batch in padded_batches
    ]
    joined_batch = DataProto.concat(selected_batches)
    joined_batch.meta_info = dict(batches[-1].meta_info)
    extra_names = joined_batch.meta_info.get("reward_extra_names", [])
    joined_batch.meta_info["reward_extra_names"] = [
        name for name in extra_names if name in common_columns
    ]
    loop_columns = {name for batch in batches for name in batch.meta_info.get("loop_columns", [])}
    joined_batch.meta_info["loop_columns"] = sorted(loop_columns & common_columns)
    return joined_batch


def pad_to_equal_widths(batches: Sequence[DataProto]) -> list[DataProto]:
    """Pads the prompts and responses of each batch to the largest widths."""
    prompt_width = max(batch.batch["prompts"].shape[1] for batch in batches)
    response_width = max(batch.batch["responses"].shape[1] for batch in batches)
    return [_pad(batch, prompt_width, response_width) for batch in batches]


def _pad(batch: DataProto, prompt_width: int, response_width: int) -> DataProto:
    left = prompt_width - batch.batch["prompts"].shape[1]
    right = response_width - batch.batch["responses"].shape[1]
    if left == 0 and right == 0:
        return batch
    tensors: dict[str, Tensor] = {}
    for name, values in batch.batch.items():
        if values.dim() < 2:
            tensors[name] = values
        elif name == "routed_experts":  # [B, P+T, layers, k]
            tensors[name] = F.pad(values, (0, 0, 0, 0, left, right), value=NOT_RECORDED)
        elif name == "attention_mask":  # [B, P+T]
            tensors[name] = F.pad(values, (left, right))
        elif name == "prompts":  # [B, P]
            tensors[name] = F.pad(values, (left, 0))
        else:  # [B, T]
            tensors[name] = F.pad(values, (0, right))
    return DataProto.from_dict(tensors, batch.non_tensor_batch, dict(batch.meta_info))
