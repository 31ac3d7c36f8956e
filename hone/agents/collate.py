"""Collates trajectories into one batch: prompts padded on the left, responses on the right.

A loop that returns a list of outputs makes one row per output; the rows of a trajectory are adjacent
until dispatch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence, Sized
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.agents.contract import AgentLoopMetrics, AgentLoopOutput
from hone.columns import COLUMNS, reward_column, write
from hone.ops.rows import last_true_index
from hone.protocol import DataProto
from hone.protocol.rows import deeply_equal, object_array
from hone.text import short_repr
from hone.types import Fields, Row, Settings

LOOP_SCORE_COLUMN = reward_column("agent")
"""The column with the score that a loop returned, on the last policy token."""
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
"""Columns that are built from other fields of an output; `extra_fields` may not contain them."""


class BadTrajectory(ValueError):
    """Raised for an output of a loop that cannot be collated."""


def metric_values(metrics: AgentLoopMetrics | Settings) -> dict[str, float]:
    """Returns the values of `LOOP_METRICS` by name."""
    values = vars(metrics) if isinstance(metrics, AgentLoopMetrics) else metrics
    return {name: values.get(name, 0.0) for name in LOOP_METRICS}


def loop_metrics(metrics: Sequence[AgentLoopMetrics | Settings]) -> dict[str, float]:
    """Returns min, max and mean of the metrics of several trajectories, under verl's names."""
    summary: dict[str, float] = {}
    for name in LOOP_METRICS:
        values = [float(metric_values(entry)[name]) for entry in metrics]
        for statistic, compute in (("min", min), ("max", max), ("mean", fmean)):
            summary[f"timing_s/agent_loop/{name}/{statistic}"] = compute(values)
    own_metrics = [entry for entry in metrics if isinstance(entry, AgentLoopMetrics)]
    prompt_tokens = sum(entry.later_prompt_tokens for entry in own_metrics)
    if prompt_tokens:
        cached_tokens = sum(entry.later_cached_tokens for entry in own_metrics)
        summary["rollout/prefix_cache_hit/later_turns"] = cached_tokens / prompt_tokens
    return summary


def check_output(output: Any, loop_name: str, *, row: Row, vocab_size: int | None) -> None:
    """Raises BadTrajectory if the output of a loop is invalid."""
    if not isinstance(output, AgentLoopOutput):
        raise BadTrajectory(
            f"agent loop {loop_name!r} returned {short_repr(output)}; return an AgentLoopOutput, or a "
            "list of at least one"
        )
    for problem in _problems(output, row, vocab_size):
        raise BadTrajectory(f"agent loop {loop_name!r} returned {problem}")


def _problems(output: AgentLoopOutput, row: Row, vocab_size: int | None) -> Iterator[str]:
    """Yields the invalid values of an output, and the remedies."""
    num_tokens, experts = len(output.response_ids), output.routed_experts
    for field in ("response_mask", "response_logprobs", "versions"):
        value = getattr(output, field)
        if value is not None and len(value) != num_tokens:
            yield (
                f"{num_tokens} response_ids but {len(value)} {field}; give one entry per token, as the "
                "engine must in TokenOutput"
            )
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
    for name, value in metric_values(output.metrics).items():
        numbers[f"metrics[{name!r}]"] = value
    for name, value in numbers.items():
        if not _is_finite(value):
            yield f"{name}={short_repr(value)}; give a finite number, or leave it out"
    for field, value in output.extra_fields.items():
        origin = _origin_of_column(field, value, row)
        if origin:
            yield f"extra_fields[{field!r}], but the column {field!r} is {origin}; rename it"


def _origin_of_column(name: str, value: Any, row: Row) -> str:
    """Returns the origin of a column, or "" if an agent loop may write this value to the column."""
    if name in row:
        return "" if deeply_equal(row[name], value) else "a column of the data row"
    if name in RESERVED_COLUMNS:
        return "built from the output's other fields"
    if name in COLUMNS and COLUMNS[name].phase not in ("generate", "prompts"):
        return f"written by the phase {COLUMNS[name].phase!r}"
    return "written by the phase 'score'" if name.startswith("reward/") else ""


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def collate_outputs(outputs: Sequence[AgentLoopOutput], *, pad_token_id: int) -> DataProto:
    """Pads the trajectories to the longest prompt and the longest response, and stacks them."""
    prompt_lengths = np.array([[len(output.prompt_ids)] for output in outputs])  # [N, 1]
    response_lengths = np.array([[len(output.response_ids)] for output in outputs])  # [N, 1]
    prompt_len, response_len = int(prompt_lengths.max()), int(response_lengths.max())
    is_prompt_token = np.arange(-prompt_len, 0) >= -prompt_lengths  # [N, P]
    is_response_token = np.arange(response_len) < response_lengths  # [N, T]

    def pad(is_token: np.ndarray, field: str, pad_value: int, dtype: type = np.int64) -> Tensor:
        """Returns [N, P] or [N, T] with the field's values at the tokens, and `pad_value` elsewhere."""
        values_per_row = [getattr(output, field) for output in outputs]
        pairs = zip(values_per_row, is_token.sum(1), strict=True)
        for row, (values, length) in enumerate(pairs):
            if len(values) != length:
                raise BadTrajectory(f"row {row} has {len(values)} values for {length} tokens")
        array: np.ndarray = np.full(is_token.shape, pad_value, dtype)
        all_values = chain.from_iterable(values_per_row)
        array[is_token] = np.fromiter(all_values, dtype, count=is_token.sum())
        return torch.from_numpy(array)

    response_mask = pad(is_response_token, "response_mask", 0)
    attention_mask = np.concatenate([is_prompt_token, is_response_token], 1)
    tensors = {
        "prompts": pad(is_prompt_token, "prompt_ids", pad_token_id),
        "responses": pad(is_response_token, "response_ids", pad_token_id),
        "response_mask": response_mask,
        "attention_mask": torch.from_numpy(attention_mask).long(),
    }
    if all(output.response_logprobs is not None for output in outputs):
        log_probs = pad(is_response_token, "response_logprobs", 0, np.float32)
        tensors["rollout_log_probs"] = _zero_outside_mask(log_probs, response_mask)
    if any(output.routed_experts is not None for output in outputs):
        tensors["routed_experts"] = _routed_experts(outputs, prompt_len, response_len)
    num_scored = sum(output.reward_score is not None for output in outputs)
    check_all_or_none(num_scored, len(outputs))
    if num_scored:
        scores = [float(output.reward_score or 0.0) for output in outputs]
        tensors[LOOP_SCORE_COLUMN] = _put_on_last_policy_token(scores, response_mask)
    columns: dict[str, list[Any]] = {
        "num_turns": [output.num_turns for output in outputs],
        "stop_reason": [output.stop_reason for output in outputs],
        "versions": [
            None if output.versions is None else list(output.versions) for output in outputs
        ],
    }
    for name in sorted({key for output in outputs for key in output.extra_fields}):
        columns[name] = [output.extra_fields.get(name) for output in outputs]
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
"""Columns that are computed where they are read, and never sent to another process."""


def _routed_experts(
    outputs: Sequence[AgentLoopOutput], prompt_len: int, response_len: int
) -> Tensor:
    """Returns [B, P+T, layers, k]: the experts that the rollout recorded."""
    recorded_experts = [output.routed_experts for output in outputs]
    shape = next(experts.shape[1:] for experts in recorded_experts if experts is not None)
    column = torch.full(
        (len(outputs), prompt_len + response_len, *shape), NOT_RECORDED, dtype=torch.int16
    )
    for row, (output, experts) in enumerate(zip(outputs, recorded_experts, strict=True)):
        if experts is not None:
            # A truncated response has fewer tokens than recorded experts.
            start, end = prompt_len - len(output.prompt_ids), prompt_len + len(output.response_ids)
            column[row, start:end][: len(experts)] = experts[: end - start]
    return column


def check_all_or_none(num_scored: int, total: int) -> None:
    """Raises BadTrajectory if some but not all of `total` trajectories have a score."""
    # The message has no counts, which would depend on the number of ranks.
    if 0 < num_scored < total:
        raise BadTrajectory(
            "only some trajectories have a reward_score, and the others would count as 0; let every "
            "agent loop of a batch score its trajectories, or none"
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
    last_tokens = last_true_index(mask).clamp(min=0)
    column[torch.arange(len(values)), last_tokens] = torch.tensor(values)
    return column


def turn_rewards(batch: DataProto, name: str) -> Tensor:
    """Returns [B, T]: the rewards of tool or interaction `name`, each on the last token of its turn."""
    token_rewards = torch.zeros(batch.batch["response_mask"].shape, dtype=torch.float32)
    for row, entries in enumerate(batch.non_tensor_batch.get("turn_rewards", ())):
        for entry in entries or ():
            if entry["name"] == name and entry["token"] < token_rewards.shape[1]:
                token_rewards[row, entry["token"]] += entry["reward"]
    return token_rewards


def trajectory_rewards(batch: DataProto, name: str) -> Tensor:
    """Returns [B, T]: the final score of tool or interaction `name`, on the last policy token."""
    scores_by_name = batch.non_tensor_batch.get("reward_scores", [None] * len(batch))
    scores = [float((row_scores or {}).get(name, 0.0)) for row_scores in scores_by_name]
    return _put_on_last_policy_token(scores, batch.batch["response_mask"])


def fill_object_columns(
    batches: Sequence[DataProto], skip_columns: Collection[str] = ()
) -> list[DataProto]:
    """Adds the object columns that only other batches have, filled with None, except `skip_columns`."""
    names = dict.fromkeys(name for batch in batches for name in batch.non_tensor_batch)
    filled_batches = []
    for batch in batches:
        missing_names = names.keys() - batch.non_tensor_batch.keys() - set(skip_columns)
        arrays = {
            name: np.full(len(batch), None, dtype=object) for name in names if name in missing_names
        }
        columns = batch.non_tensor_batch | arrays
        filled_batches.append(type(batch)(batch.batch, columns, batch.meta_info))
    return filled_batches


def repeat_rows_per_output(rows: DataProto, row_indices: Sequence[int]) -> DataProto:
    """Repeats each row of a group once per output of its loop.

    `row_indices` has the row index of each output, in a batch in which the group's rows are adjacent.
    """
    if len(row_indices) == len(rows):
        return rows
    trajectory_rows = [row_indices[:i].count(row) for i, row in enumerate(row_indices)]
    repeated_rows = rows.select_idxs([row - row_indices[0] for row in row_indices])
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
