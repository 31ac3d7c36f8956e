"""Pads batches to equal widths: prompts on the left, responses on the right."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from hone.protocol import DataProto
from hone.protocol.rows import fill_object_columns

NOT_RECORDED = -1
"""The value of `routed_experts` for tokens that the rollout did not compute."""


def pad_and_concat(batches: Sequence[DataProto]) -> DataProto:
    """Pads batches to the largest width and concatenates them; padding has attention and mask 0.

    A column that some batches lack is filled with None if an agent loop wrote it, and dropped if a
    reward function wrote it.
    """
    reward_columns = {name for b in batches for name in b.meta_info.get("reward_extra_names", [])}
    padded = fill_object_columns(pad_to_equal_widths(batches), leave=reward_columns)
    common_columns = set.intersection(*(set(b.column_names()) for b in padded))
    selected_batches = [
        b.select(
            batch_keys=[n for n in b.batch.keys() if n in common_columns],  # noqa: SIM118
            non_tensor_batch_keys=[n for n in b.non_tensor_batch if n in common_columns],
            meta_info_keys=[],
        )
        for b in padded
    ]
    joined = DataProto.concat(selected_batches)
    joined.meta_info = dict(batches[-1].meta_info)
    extra_names = joined.meta_info.get("reward_extra_names", [])
    joined.meta_info["reward_extra_names"] = [
        name for name in extra_names if name in common_columns
    ]
    loop_columns = {name for b in batches for name in b.meta_info.get("loop_columns", [])}
    joined.meta_info["loop_columns"] = sorted(loop_columns & common_columns)
    return joined


def pad_to_equal_widths(batches: Sequence[DataProto]) -> list[DataProto]:
    """Pads the prompts and responses of each batch to the largest widths."""
    prompt_width = max(b.batch["prompts"].shape[1] for b in batches)
    response_width = max(b.batch["responses"].shape[1] for b in batches)
    return [_pad(b, prompt_width, response_width) for b in batches]


def _pad(batch: DataProto, prompt_width: int, response_width: int) -> DataProto:
    left_padding = prompt_width - batch.batch["prompts"].shape[1]
    right_padding = response_width - batch.batch["responses"].shape[1]
    if left_padding == 0 and right_padding == 0:
        return batch
    tensors: dict[str, Tensor] = {}
    for name, values in batch.batch.items():
        if values.dim() < 2:
            tensors[name] = values
        elif name == "prompts":
            tensors[name] = F.pad(values, (left_padding, 0))
        elif name == "attention_mask":
            tensors[name] = F.pad(values, (left_padding, right_padding))
        elif name == "routed_experts":  # [B, P+T, layers, k]
            tensors[name] = F.pad(
                values, (0, 0, 0, 0, left_padding, right_padding), value=NOT_RECORDED
            )
        else:
            tensors[name] = F.pad(values, (0, right_padding))
    return DataProto.from_dict(tensors, batch.non_tensor_batch, dict(batch.meta_info))
