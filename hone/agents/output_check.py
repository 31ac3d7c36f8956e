"""What a loop returned, checked where its name is still known: a batch would only say that it failed."""

from __future__ import annotations

import math
from typing import Any

from hone.agents.contract import AgentLoopMetrics, AgentLoopOutput
from hone.columns import COLUMNS
from hone.protocol.rows import same
from hone.text import shown
from hone.types import Settings

MEASURED = ("generate_sequences", "tool_calls", "num_preempted")
"""What every loop may measure; absent is 0."""

COLLATED = (
    "prompts",
    "responses",
    "response_mask",
    "attention_mask",
    "input_ids",
    "position_ids",
    "rollout_log_probs",
    "rm_scores",
    "reward/agent",
    "num_turns",
    "stop_reason",
    "versions",
)
"""Columns that are made of the other fields of an output."""


class BadTrajectory(ValueError):
    """A loop returned something no batch can hold."""


def check_output(
    output: AgentLoopOutput, name: str, *, row: Settings, vocabulary: int | None
) -> None:
    """Say which loop returned what; a wrong mask would train on the wrong tokens."""
    tokens = len(output.response_ids)
    for field, value in (
        ("response_mask", output.response_mask),
        ("response_logprobs", output.response_logprobs),
        ("versions", output.versions),
    ):
        if value is not None and len(value) != tokens:
            raise BadTrajectory(
                f"agent loop {name!r} returned {tokens} response_ids but {len(value)} {field}; "
                "they must have one entry a token"
            )
    if len(output.prompt_ids) == 0 or tokens == 0:
        raise BadTrajectory(f"agent loop {name!r} returned an empty prompt or response")
    if not _is_mask(output.response_mask):
        raise BadTrajectory(
            f"agent loop {name!r} returned a response_mask with values other than 0, 1"
        )
    _check_ids(output, name, vocabulary)
    if output.routed_experts is not None:
        raise BadTrajectory(
            f"agent loop {name!r} returned routed_experts, but routing is not replayed; give None"
        )
    score = output.reward_score
    if score is not None and not _is_finite(score):
        raise BadTrajectory(
            f"agent loop {name!r} returned reward_score={score!r}; give a finite number, or None in "
            "every loop where the reward function scores"
        )
    if not isinstance(output.stop_reason, str | None):
        raise BadTrajectory(
            f"agent loop {name!r} returned stop_reason={shown(output.stop_reason)}; give text or None"
        )
    if not _is_finite(output.num_turns):
        raise BadTrajectory(
            f"agent loop {name!r} returned num_turns={shown(output.num_turns)}; give a number"
        )
    for name_of, number in measured(output).items():
        if not _is_finite(number):
            raise BadTrajectory(
                f"agent loop {name!r} returned metrics[{name_of!r}]={number!r}; give a number, or leave "
                "it out"
            )
    _check_extra_fields(output, name, row)


def measured(output: AgentLoopOutput) -> dict[str, float]:
    """What the loop measured, by name."""
    metrics = output.metrics
    given = vars(metrics) if isinstance(metrics, AgentLoopMetrics) else dict(metrics)
    return {name: given.get(name, 0.0) for name in MEASURED}


def _check_ids(output: AgentLoopOutput, name: str, vocabulary: int | None) -> None:
    for field, ids in (("prompt_ids", output.prompt_ids), ("response_ids", output.response_ids)):
        low, high = min(ids), max(ids)
        if low < 0 or (vocabulary is not None and high >= vocabulary):
            known = "0 and up" if vocabulary is None else f"0 to {vocabulary - 1}"
            raise BadTrajectory(
                f"agent loop {name!r} returned {field} from {low} to {high}; the model knows {known}"
            )


def _check_extra_fields(output: AgentLoopOutput, name: str, row: Settings) -> None:
    """A loop may hand a column of its row through, but neither change it nor write ours."""
    for field, value in output.extra_fields.items():
        known = COLUMNS.get(field)
        if field in row:
            taken = "" if same(row[field], value) else "a column of the data row"
        elif field in COLLATED:
            taken = "made of the output's other fields"
        elif known is not None and known.step not in ("generate", "prompts"):
            taken = f"written by the step {known.step!r}"
        else:
            taken = "written by the step 'score'" if field.startswith("reward/") else ""
        if taken:
            raise BadTrajectory(
                f"agent loop {name!r} returned extra_fields[{field!r}], but the column {field!r} is "
                f"{taken}; choose another name"
            )


def _is_mask(mask: Any) -> bool:
    values = mask.tolist() if hasattr(mask, "tolist") else list(mask)
    return values.count(0) + values.count(1) == len(values)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return False
