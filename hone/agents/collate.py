"""Collates trajectories into one batch: prompts padded on the left, responses on the right.

Each rank collates its own rows; `join_ranks` concatenates the batches of the ranks. Each output
that a loop returns in a list is one row, and the rows of a trajectory are adjacent until dispatch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence, Sized
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hone.agents.contract import AgentLoopMetrics, AgentLoopOutput
from hone.columns import COLUMNS, reward_column, write
from hone.ops.rows import last_true_index
from hone.protocol import DataProto
from hone.protocol.rows import deeply_equal, object_array
from hone.text import short_repr
from hone.types import Fields, Row, Settings

LOOP_SCORE_COLUMN = reward_column("agent")
"""The column of the score that a loop returned, on the last policy token."""

LOOP_METRICS = ("generate_sequences", "tool_calls", "num_preempted")
"""Metrics that any loop may return; missing ones are 0."""
NOT_RECORDED = -1  # the value of `routed_experts` for tokens that the rollout did not compute
TRAJECTORY_ROW = "trajectory_row"
"""The column of each row's index in its trajectory (None means 0); absent if every trajectory has one row."""


RESERVED_COLUMNS = (
    *("prompts", "responses", "response_mask", "attention_mask", "input_ids", "position_ids"),
    *("rollout_log_probs", "rm_scores", LOOP_SCORE_COLUMN, "num_turns", "stop_reason", "versions"),
    TRAJECTORY_ROW,
)
"""Columns that are built from the other fields of an output, so `extra_fields` may not set them."""


class BadTrajectory(ValueError):
    """A loop returned an output that cannot be collated."""


def metric_values(metrics: AgentLoopMetrics | Settings) -> dict[str, float]:
    """Returns the values of `LOOP_METRICS` by name."""
    values = vars(metrics) if isinstance(metrics, AgentLoopMetrics) else metrics
    return {name: values.get(name, 0.0) for name in LOOP_METRICS}


def loop_metrics(loops: Sequence[AgentLoopMetrics | Settings]) -> dict[str, float]:
    """Returns min, max and mean of the metrics of `loops` under verl's names."""
    summary: dict[str, float] = {}
    for name in LOOP_METRICS:
        values = [float(metric_values(loop)[name]) for loop in loops]
        for statistic, compute in (("min", min), ("max", max), ("mean", fmean)):
            summary[f"timing_s/agent_loop/{name}/{statistic}"] = compute(values)
    metrics = [loop for loop in loops if isinstance(loop, AgentLoopMetrics)]
    if prompt_tokens := sum(m.later_prompt_tokens for m in metrics):
        cached_tokens = sum(m.later_cached_tokens for m in metrics)
        summary["rollout/prefix_cache_hit/later_turns"] = cached_tokens / prompt_tokens
    return summary


def check_output(output: Any, loop_name: str, *, row: Row, vocab_size: int | None) -> None:
    """Raises BadTrajectory on an invalid output."""
    if not isinstance(output, AgentLoopOutput):
        raise BadTrajectory(
            f"agent loop {loop_name!r} returned {short_repr(output)}; return an AgentLoopOutput, or a "
            "list of at least one"
        )
    for problem in _problems(output, row, vocab_size):
        raise BadTrajectory(f"agent loop {loop_name!r} returned {problem}")


def _problems(output: AgentLoopOutput, row: Row, vocab_size: int | None) -> Iterator[str]:
    num_tokens, experts = len(output.response_ids), output.routed_experts
    for field in ("response_mask", "response_logprobs", "versions"):
        value = getattr(output, field)
        if value is not None and len(value) != num_tokens:
            yield f"{num_tokens} response_ids but {len(value)} {field}; give one entry per token"
    if len(output.prompt_ids) == 0 or num_tokens == 0:
        yield "an empty prompt or response"
    mask = list(output.response_mask)
    if mask.count(0) + mask.count(1) != len(mask):
        yield "a response_mask with values other than 0, 1"
    for field, ids in (("prompt_ids", output.prompt_ids), ("response_ids", output.response_ids)):
        low, high = min(ids), max(ids)
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            valid_ids = "0 and up" if vocab_size is None else f"0 to {vocab_size - 1}"
            yield f"{field} from {low} to {high}; the model knows {valid_ids}"
    if experts is not None and experts.dim() != 3:
        yield f"routed_experts of shape {tuple(experts.shape)}; give [tokens, layers, k], or None"
    for name, media in (output.multi_modal_data or {}).items():
        if media is not None and not (isinstance(media, Sized) and len(media) == 0):
            yield f"{name} in multi_modal_data; images, video and audio are not supported"
    if not isinstance(output.stop_reason, str | None):
        yield f"stop_reason={short_repr(output.stop_reason)}; give text or None"
    numbers: Fields = {"num_turns": output.num_turns}
    if output.reward_score is not None:
        numbers["reward_score"] = output.reward_score
    numbers |= {f"metrics[{k!r}]": v for k, v in metric_values(output.metrics).items()}
    for name, value in numbers.items():
        if not _is_finite(value):
            yield f"{name}={short_repr(value)}; give a finite number, or leave it out"
    for field, value in output.extra_fields.items():
        if origin := _origin_of_column(field, value, row):
            yield f"extra_fields[{field!r}], but the column {field!r} is {origin}; rename it"


def _origin_of_column(name: str, value: Any, row: Row) -> str:
    """Returns where a column comes from if an agent loop may not write this value to it, else ""."""
    if name in row:
        return "" if deeply_equal(row[name], value) else "a column of the data row"
    if name in RESERVED_COLUMNS:
        return "built from the output's other fields"
    if name in COLUMNS and COLUMNS[name].step not in ("generate", "prompts"):
        return f"written by the step {COLUMNS[name].step!r}"
    return "written by the step 'score'" if name.startswith("reward/") else ""


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def collate_outputs(outputs: Sequence[AgentLoopOutput], *, pad_token_id: int) -> DataProto:
    """Pads the trajectories to the longest prompt and the longest response, and stacks them."""
    prompt_lengths = np.array([[len(o.prompt_ids)] for o in outputs])  # [N, 1]
    response_lengths = np.array([[len(o.response_ids)] for o in outputs])  # [N, 1]
    prompt_len, response_len = int(prompt_lengths.max()), int(response_lengths.max())
    is_prompt_token = np.arange(-prompt_len, 0) >= -prompt_lengths  # [N, P]
    is_response_token = np.arange(response_len) < response_lengths  # [N, T]

    def pad(is_token: np.ndarray, field: str, pad_value: int, dtype: type = np.int64) -> Tensor:
        """Returns [N, P] or [N, T] with the field's values at the tokens, and `pad_value` elsewhere."""
        rows = [getattr(output, field) for output in outputs]
        for row, (values, length) in enumerate(zip(rows, is_token.sum(1), strict=True)):
            if len(values) != length:
                raise BadTrajectory(f"row {row} has {len(values)} values for {length} tokens")
        array: np.ndarray = np.full(is_token.shape, pad_value, dtype)
        array[is_token] = np.fromiter(chain.from_iterable(rows), dtype, count=is_token.sum())
        return torch.from_numpy(array)

    response_mask = pad(is_response_token, "response_mask", 0)
    attention_mask = np.concatenate([is_prompt_token, is_response_token], 1)
    tensors = {
        "prompts": pad(is_prompt_token, "prompt_ids", pad_token_id),
        "responses": pad(is_response_token, "response_ids", pad_token_id),
        "response_mask": response_mask,
        "attention_mask": torch.from_numpy(attention_mask).long(),
    }
    if all(o.response_logprobs is not None for o in outputs):
        log_probs = pad(is_response_token, "response_logprobs", 0, np.float32)
        tensors["rollout_log_probs"] = _zero_outside_mask(log_probs, response_mask)
    if any(o.routed_experts is not None for o in outputs):
        tensors["routed_experts"] = _routed_experts(outputs, prompt_len, response_len)
    num_scored = sum(o.reward_score is not None for o in outputs)
    _check_all_or_none(num_scored, len(outputs))
    if num_scored:
        scores = [float(o.reward_score or 0.0) for o in outputs]
        tensors[LOOP_SCORE_COLUMN] = _put_on_last_policy_token(scores, response_mask)
    columns: dict[str, list[Any]] = {
        "num_turns": [o.num_turns for o in outputs],
        "stop_reason": [o.stop_reason for o in outputs],
        "versions": [list(o.versions) if o.versions is not None else None for o in outputs],
    }
    for name in sorted({key for o in outputs for key in o.extra_fields}):
        columns[name] = [o.extra_fields.get(name) for o in outputs]
    arrays = {name: object_array(values) for name, values in columns.items()}
    return DataProto.from_dict(tensors=tensors, non_tensors=arrays)


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
    column = torch.zeros(mask.shape, dtype=torch.float32)
    column[torch.arange(len(values)), last_true_index(mask).clamp(min=0)] = torch.tensor(values)
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
        else:
            is_prompt, is_response = name == "prompts", name not in ("prompts", "attention_mask")
            tensors[name] = F.pad(values, (0 if is_response else left, 0 if is_prompt else right))
    return DataProto.from_dict(tensors, batch.non_tensor_batch, dict(batch.meta_info))


def fill_object_columns(
    data: Sequence[DataProto], skip_columns: Collection[str] = ()
) -> list[DataProto]:
    """Fills with None the object columns that a batch lacks, except the columns in `skip_columns`."""
    names = dict.fromkeys(name for batch in data for name in batch.non_tensor_batch)
    result = []
    for batch in data:
        missing = [n for n in names if n not in batch.non_tensor_batch and n not in skip_columns]
        arrays = {name: np.full(len(batch), None, dtype=object) for name in missing}
        result.append(type(batch)(batch.batch, batch.non_tensor_batch | arrays, batch.meta_info))
    return result


def repeat_rows_per_output(rows: DataProto, output_rows: Sequence[int]) -> DataProto:
    """Repeats each row of a group once per output of its loop.; `output_rows` has their row indices."""
    if len(output_rows) == len(rows):
        return rows
    trajectory_rows = [output_rows[:i].count(row) for i, row in enumerate(output_rows)]
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
    if last_indices is None:
        return np.full(len(batch), True)
    return np.isin(np.arange(len(batch)), last_indices)


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
