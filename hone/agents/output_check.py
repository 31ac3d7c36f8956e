"""Checks the output of an agent loop; error messages name the loop."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from hone.agents.contract import AgentLoopMetrics, AgentLoopOutput
from hone.columns import COLUMNS
from hone.protocol.rows import same
from hone.text import shown
from hone.types import Row

LOOP_METRICS = ("generate_sequences", "tool_calls", "num_preempted")
"""Metrics that any loop may return; missing ones are 0."""
RESERVED_COLUMNS = (
    *("prompts", "responses", "response_mask", "attention_mask", "input_ids", "position_ids"),
    *("rollout_log_probs", "rm_scores", "reward/agent", "num_turns", "stop_reason", "versions"),
    "trajectory_row",
)
"""Columns that `collate_outputs` builds from the other fields of an output."""


class BadTrajectory(ValueError):
    """A loop returned an output that cannot be collated."""


def check_output(output: Any, loop_name: str, *, row: Row, vocab_size: int | None) -> None:
    """Raises BadTrajectory on an invalid output."""
    if not isinstance(output, AgentLoopOutput):
        raise BadTrajectory(
            f"agent loop {loop_name!r} returned {shown(output)}; return an AgentLoopOutput, or a "
            "list of at least one"
        )
    for problem in _problems(output, row, vocab_size):
        raise BadTrajectory(f"agent loop {loop_name!r} returned {problem}")


def metric_values(output: AgentLoopOutput) -> dict[str, float]:
    """Returns the values of `LOOP_METRICS` by name."""
    metrics = output.metrics
    values = vars(metrics) if isinstance(metrics, AgentLoopMetrics) else dict(metrics)
    return {name: values.get(name, 0.0) for name in LOOP_METRICS}


def _problems(output: AgentLoopOutput, row: Row, vocab_size: int | None) -> Iterator[str]:
    num_tokens = len(output.response_ids)
    for field in ("response_mask", "response_logprobs", "versions"):
        value = getattr(output, field)
        if value is not None and len(value) != num_tokens:
            yield (f"{num_tokens} response_ids but {len(value)} {field}; give one entry per token")
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
    if (experts := output.routed_experts) is not None and experts.dim() != 3:
        yield f"routed_experts of shape {tuple(experts.shape)}; give [tokens, layers, k], or None"
    if output.reward_score is not None and not _is_finite(output.reward_score):
        yield (
            f"reward_score={output.reward_score!r}; give a finite number, or None in every loop "
            "if the reward function scores"
        )
    if not isinstance(output.stop_reason, str | None):
        yield f"stop_reason={shown(output.stop_reason)}; give text or None"
    if not _is_finite(output.num_turns):
        yield f"num_turns={shown(output.num_turns)}; give a number"
    for name, value in metric_values(output).items():
        if not _is_finite(value):
            yield f"metrics[{name!r}]={value!r}; give a number, or leave it out"
    yield from _extra_field_problems(output, row)


def _extra_field_problems(output: AgentLoopOutput, row: Row) -> Iterator[str]:
    """Yields a problem per extra field that changes a column of the row or a reserved column."""
    for field, value in output.extra_fields.items():
        column = COLUMNS.get(field)
        origin = ""
        if field in row:
            origin = "" if same(row[field], value) else "a column of the data row"
        elif field in RESERVED_COLUMNS:
            origin = "built from the output's other fields"
        elif column is not None and column.step not in ("generate", "prompts"):
            origin = f"written by the step {column.step!r}"
        elif field.startswith("reward/"):
            origin = "written by the step 'score'"
        if origin:
            yield f"extra_fields[{field!r}], but the column {field!r} is {origin}; rename it"


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return False
