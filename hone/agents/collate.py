"""Collates trajectories into one batch: prompts padded on the left, responses on the right.

Each rank collates its own rows; `join_ranks` concatenates the batches of the ranks. Each output
that a loop returns in a list is one row, and the rows of a trajectory are adjacent until dispatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence, Sized
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hone.agents.contract import AgentLoopOutput
from hone.agents.trajectory import BadTrajectory
from hone.columns import reward_column, write
from hone.ops.masked import last_true_index
from hone.protocol import DataProto
from hone.protocol.rows import object_array

LOOP_SCORE_COLUMN = reward_column("agent")
"""The column of the score that a loop returned, on the last policy token."""

NOT_RECORDED = -1
"""The value of `routed_experts` for tokens that the rollout did not compute."""
TRAJECTORY_ROW = "trajectory_row"
"""The column of each row's index in its trajectory (None means 0); absent if every trajectory has one row."""


def collate_outputs(outputs: Sequence[AgentLoopOutput], *, pad_token_id: int) -> DataProto:
    """Pads the trajectories to the longest prompt and the longest response, and stacks them."""
    prompt_len = max(len(o.prompt_ids) for o in outputs)
    response_len = max(len(o.response_ids) for o in outputs)
    prompt_token_mask = np.arange(-prompt_len, 0) >= -_row_lengths([o.prompt_ids for o in outputs])
    response_token_mask = np.arange(response_len) < _row_lengths([o.response_ids for o in outputs])
    prompts = _pad_rows(prompt_token_mask, [o.prompt_ids for o in outputs], pad_token_id, np.int64)
    responses = _pad_rows(
        response_token_mask, [o.response_ids for o in outputs], pad_token_id, np.int64
    )
    response_mask = _pad_rows(response_token_mask, [o.response_mask for o in outputs], 0, np.int64)
    attention_mask = torch.from_numpy(
        np.concatenate([prompt_token_mask, response_token_mask], 1)
    ).long()
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": response_mask,
        "attention_mask": attention_mask,
    }
    log_probs = [o.response_logprobs for o in outputs if o.response_logprobs is not None]
    if len(log_probs) == len(outputs):
        padded_log_probs = _pad_rows(response_token_mask, log_probs, 0.0, np.float32)
        tensors["rollout_log_probs"] = _zero_outside_mask(padded_log_probs, response_mask)
    if any(o.routed_experts is not None for o in outputs):
        tensors["routed_experts"] = _routed_experts(outputs, prompt_len, response_len)
    num_scored = sum(o.reward_score is not None for o in outputs)
    _check_all_or_none(num_scored, len(outputs))
    if num_scored:
        scores = [float(o.reward_score or 0.0) for o in outputs]
        tensors[LOOP_SCORE_COLUMN] = _put_on_last_policy_token(scores, response_mask)
    return DataProto.from_dict(tensors=tensors, non_tensors=_object_columns(outputs))


def input_ids(batch: DataProto) -> Tensor:
    """Returns [B, P+T]: prompts followed by responses."""
    return torch.cat([batch.batch["prompts"], batch.batch["responses"]], 1)


def position_ids(batch: DataProto) -> Tensor:
    """Returns [B, P+T]: each token's position in its row, from 0; 0 in the padding."""
    positions: Tensor = (batch.batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return positions


DERIVED_COLUMNS = {"input_ids": input_ids, "position_ids": position_ids}
"""Columns that are computed from others where they are read, and never sent."""


def add_verl_columns(batch: DataProto) -> DataProto:
    """Adds columns that code written for verl reads: `input_ids`, `position_ids`, `rm_scores`."""
    for name, compute in DERIVED_COLUMNS.items():
        write(batch, name, compute(batch))
    if batch.has_column(LOOP_SCORE_COLUMN):
        write(batch, "rm_scores", batch.column(LOOP_SCORE_COLUMN))
    return batch


def join_ranks(worker_group: object, results: Sequence[DataProto]) -> DataProto:
    """Concatenates the batches that the ranks of a worker group collated.

    A column that only some ranks have is filled with None, `routed_experts` with NOT_RECORDED;
    `rollout_log_probs` is dropped.
    """
    batches = fill_object_columns(results)
    _check_all_or_none(sum(b.has_column(LOOP_SCORE_COLUMN) for b in batches), len(batches))
    if not all(b.has_column("rollout_log_probs") for b in batches):
        for batch in batches:
            batch.batch.pop("rollout_log_probs", None)
    recorded_experts = [
        b.batch["routed_experts"] for b in batches if b.has_column("routed_experts")
    ]
    for batch in batches if recorded_experts else ():
        if not batch.has_column("routed_experts"):
            shape = (*batch.batch["attention_mask"].shape, *recorded_experts[0].shape[2:])
            batch.batch["routed_experts"] = recorded_experts[0].new_full(shape, NOT_RECORDED)
    return DataProto.concat(pad_to_equal_widths(batches))


def _routed_experts(
    outputs: Sequence[AgentLoopOutput], prompt_len: int, response_len: int
) -> Tensor:
    """Returns [B, P+T, layers, k]: the experts that the rollout recorded."""
    recorded_experts = [o.routed_experts for o in outputs]
    shape = next(experts.shape[1:] for experts in recorded_experts if experts is not None)
    column = torch.full(
        (len(outputs), prompt_len + response_len, *shape), NOT_RECORDED, dtype=torch.int16
    )
    for row, (output, experts) in enumerate(zip(outputs, recorded_experts, strict=True)):
        if experts is not None:
            # A loop may have truncated its response.
            start, end = prompt_len - len(output.prompt_ids), prompt_len + len(output.response_ids)
            column[row, start:end][: len(experts)] = experts[: end - start]
    return column


def _check_all_or_none(num_scored: int, total: int) -> None:
    # The message has no counts, because it must not depend on the number of ranks.
    if 0 < num_scored < total:
        raise BadTrajectory(
            "only some trajectories have a reward_score; the others would count as 0: "
            "either every agent loop of a batch scores its trajectories, or none does"
        )


def _zero_outside_mask(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Returns the log-probs with 0 where the mask is 0; raises on a NaN where the mask is 1."""
    nan_positions = (log_probs.isnan() & (mask != 0)).nonzero()
    if len(nan_positions):
        row, token = nan_positions[0].tolist()
        raise BadTrajectory(
            f"trajectory {row} has a NaN in response_logprobs at token {token}, where its "
            "response_mask is 1; give the log-prob that the engine returned"
        )
    return log_probs.where(mask != 0, 0.0)


def _put_on_last_policy_token(values: Sequence[float], mask: Tensor) -> Tensor:
    """Returns [B, T]: each row's value on its last policy token, 0 elsewhere."""
    last_token = last_true_index(mask).clamp(min=0)
    column = torch.zeros(mask.shape, dtype=torch.float32)
    column[torch.arange(len(values)), last_token] = torch.tensor(values)
    return column


def turn_rewards(batch: DataProto, name: str) -> Tensor:
    """Returns [B, T]: the rewards of tool or interaction `name`, each on the last token of its turn."""
    token_rewards = torch.zeros(batch.batch["response_mask"].shape, dtype=torch.float32)
    for row, rewards in enumerate(batch.non_tensor_batch.get("turn_rewards", ())):
        for entry in rewards or ():
            if entry["name"] == name and entry["token"] < token_rewards.shape[1]:
                token_rewards[row, entry["token"]] += entry["reward"]
    return token_rewards


def trajectory_rewards(batch: DataProto, name: str) -> Tensor:
    """Returns [B, T]: a tool's or interaction's final score, on the last policy token."""
    scores_by_name = batch.non_tensor_batch.get("reward_scores", [None] * len(batch))
    scores = [float((row_scores or {}).get(name, 0.0)) for row_scores in scores_by_name]
    return _put_on_last_policy_token(scores, batch.batch["response_mask"])


def _object_columns(outputs: Sequence[AgentLoopOutput]) -> dict[str, np.ndarray]:
    columns: dict[str, list[Any]] = {
        "num_turns": [o.num_turns for o in outputs],
        "stop_reason": [o.stop_reason for o in outputs],
        "versions": [list(o.versions) if o.versions is not None else None for o in outputs],
    }
    for name in sorted({key for o in outputs for key in o.extra_fields}):
        columns[name] = [o.extra_fields.get(name) for o in outputs]
    return {name: object_array(values) for name, values in columns.items()}


def _row_lengths(rows: Sequence[Sized]) -> np.ndarray:  # [N, 1]
    return np.array([[len(row)] for row in rows])


def _pad_rows(
    value_mask: np.ndarray,  # [N, W] true where a row's values go
    rows: Sequence[Sequence[float]],
    pad_value: float,
    dtype: type,
) -> Tensor:
    """Returns [N, W] with the rows' values at the true positions, and `pad_value` elsewhere."""
    lengths = value_mask.sum(1, keepdims=True)
    if len(mismatched_rows := (_row_lengths(rows) != lengths).nonzero()[0]):
        row = int(mismatched_rows[0])
        raise BadTrajectory(f"row {row} has {len(rows[row])} values for {lengths[row, 0]} tokens")
    array: np.ndarray = np.full(value_mask.shape, pad_value, dtype)
    array[value_mask] = np.fromiter(chain.from_iterable(rows), dtype, count=int(lengths.sum()))
    return torch.from_numpy(array)


def pad_and_concat(batches: Sequence[DataProto]) -> DataProto:
    """Pads batches to the largest width and concatenates them; the masks are 0 at padding.

    A column that some batches lack is filled with None if an agent loop wrote it, and dropped if a
    reward function wrote it.
    """
    reward_columns = {name for b in batches for name in b.meta_info.get("reward_extra_names", [])}
    padded_batches = fill_object_columns(pad_to_equal_widths(batches), skip_columns=reward_columns)
    common_columns = set.intersection(*(set(b.column_names()) for b in padded_batches))
    selected_batches = [
        b.select(
            batch_keys=[n for n in b.batch.keys() if n in common_columns],  # noqa: SIM118
            non_tensor_batch_keys=[n for n in b.non_tensor_batch if n in common_columns],
            meta_info_keys=[],
        )
        for b in padded_batches
    ]
    joined_batch = DataProto.concat(selected_batches)
    joined_batch.meta_info = dict(batches[-1].meta_info)
    extra_names = joined_batch.meta_info.get("reward_extra_names", [])
    joined_batch.meta_info["reward_extra_names"] = [
        name for name in extra_names if name in common_columns
    ]
    loop_columns = {name for b in batches for name in b.meta_info.get("loop_columns", [])}
    joined_batch.meta_info["loop_columns"] = sorted(loop_columns & common_columns)
    return joined_batch


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


def fill_object_columns(
    data: Sequence[DataProto], skip_columns: Collection[str] = ()
) -> list[DataProto]:
    """Fills with None the object columns that a batch lacks, except the columns in `skip_columns`."""
    names = dict.fromkeys(name for batch in data for name in batch.non_tensor_batch)
    result = []
    for batch in data:
        missing = [n for n in names if n not in batch.non_tensor_batch and n not in skip_columns]
        arrays = batch.non_tensor_batch | {
            name: np.full(len(batch), None, dtype=object) for name in missing
        }
        result.append(type(batch)(batch.batch, arrays, batch.meta_info))
    return result


def repeat_rows_per_output(rows: DataProto, output_rows: Sequence[int]) -> DataProto:
    """Repeats each row of a group once per output of its loop.

    `output_rows[i]` is the index in the submitted batch of the row of output i.
    """
    if len(output_rows) == len(rows):
        return rows
    counts: Counter[int] = Counter()
    trajectory_rows = []
    for row in output_rows:
        trajectory_rows.append(counts[row])
        counts[row] += 1
    repeated_rows = rows.select_idxs([row - output_rows[0] for row in output_rows])
    write(repeated_rows, TRAJECTORY_ROW, object_array(trajectory_rows))
    return repeated_rows


def trajectory_indices(batch: DataProto) -> Tensor | None:
    """Returns [B]: the index of each row's trajectory; None if every row is a trajectory."""
    trajectory_rows = batch.non_tensor_batch.get(TRAJECTORY_ROW)
    if trajectory_rows is None:
        return None
    is_first_row = torch.tensor([not index for index in trajectory_rows])
    return is_first_row.cumsum(0) - 1


def last_row_indices(batch: DataProto) -> Tensor | None:
    """Returns [N]: the index of each trajectory's last row; None if every row is a trajectory."""
    indices = trajectory_indices(batch)
    return None if indices is None else indices.bincount().cumsum(0) - 1


def is_last_row(batch: DataProto) -> np.ndarray:
    """Returns [B] bool: whether the row is the last of its trajectory."""
    last_indices = last_row_indices(batch)
    mask = np.full(len(batch), last_indices is None)
    if last_indices is not None:
        mask[last_indices.numpy()] = True
    return mask


def last_row_values(batch: DataProto, column: np.ndarray) -> np.ndarray:
    """Returns [N]: the values of a column [B] at the last row of each trajectory."""
    last_indices = last_row_indices(batch)
    return column if last_indices is None else column[last_indices.numpy()]


def trajectory_totals(batch: DataProto, per_row: Tensor) -> Tensor:
    """Returns [N]: the sums of `per_row` [B] over the rows of each trajectory."""
    indices = trajectory_indices(batch)
    if indices is None:
        return per_row
    return per_row.new_zeros(len(indices.bincount())).index_add_(0, indices, per_row)
