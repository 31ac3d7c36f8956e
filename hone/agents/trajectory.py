"""Runs the agent loop of one row, with a seed per trajectory.

The seed is derived from (run seed, uid, sample index), so that a row's tokens do not depend on the
other rows of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hone.agents.contract import AgentLoopMetrics, AgentLoopOutput, ServerManager
from hone.agents.deadline import run_with_deadline
from hone.agents.loops.listing import LoopFactory, LoopNames, build_loop
from hone.agents.output_check import LOOP_METRICS, check_output, metric_values
from hone.config import PPOTrainerConfig
from hone.ops.counter_rng import trajectory_seed
from hone.protocol import DataProto
from hone.rollout.contract import RolloutEngine
from hone.tokenizer import Tokenizer
from hone.types import Fields, Row


class AgentLoopFailed(RuntimeError):
    """A loop raised; the message names the loop, the row and the error."""


class Job(NamedTuple):
    """One row and its agent loop."""

    loop_name: str
    factory: LoopFactory
    sampling_params: Fields
    row: Row


@dataclass
class TrajectoryMaker:
    """Runs the agent loop of each row, with a new loop object per row."""

    config: PPOTrainerConfig
    engine: RolloutEngine
    tokenizer: Tokenizer
    run_seed: int
    vocab_size: int | None

    def __post_init__(self) -> None:
        self._loop_names = LoopNames(self.config.actor_rollout_ref.rollout)

    def jobs(self, rows: DataProto) -> list[Job]:
        """Pairs each row with its loop; raises on an unknown loop name."""
        columns, sampling_params = rows.non_tensor_batch, rows.meta_info["sampling_params"]
        agent_names = columns.get("agent_name", [None] * len(rows))
        names = [self._loop_names.of_row(name) for name in agent_names]
        factories = {name: self._loop_names.factory(name) for name in set(names)}
        return [
            Job(name, factories[name], dict(sampling_params), {k: v[i] for k, v in columns.items()})
            for i, name in enumerate(names)
        ]

    async def make(self, job: Job) -> tuple[AgentLoopOutput, ...]:
        """Runs the row's loop and returns the outputs of its trajectory, usually one."""
        name, row = job.loop_name, job.row
        rollout = self.config.actor_rollout_ref.rollout
        manager = ServerManager(
            self.engine,
            seed=trajectory_seed(self.run_seed, row["uid"], row["sample_index"]),
            max_tokens=rollout.response_length,
            max_model_len=rollout.max_model_len,
        )

        async def run_loop() -> list[AgentLoopOutput]:
            loop = build_loop(job.factory, self.config, manager, self.tokenizer)
            loop.request_id = row["trajectory_id"]
            result: Any = await loop.run(job.sampling_params, **row)
            outputs = list(result) if isinstance(result, list | tuple) and result else [result]
            for output in outputs:
                check_output(output, name, row=row, vocab_size=self.vocab_size)
            return outputs

        try:
            # A cancelled loop gets the time of one tool call to release its tools.
            grace_s = rollout.multi_turn.tool_timeout_s
            outputs = await run_with_deadline(run_loop(), None, grace_s=grace_s)
        except Exception as error:
            raise AgentLoopFailed(
                f"agent loop {name!r} failed on row uid={row['uid']} sample {row['sample_index']}: "
                f"{type(error).__name__}: {error}"
            ) from error
        is_scored = any(output.reward_score is not None for output in outputs)
        for output in outputs:
            if is_scored and output.reward_score is None:
                output.reward_score = 0.0  # a trajectory's score is the sum over its rows
            # Columns that the loop copied from its row are already in the batch.
            output.extra_fields = {k: v for k, v in output.extra_fields.items() if k not in row}
        return tuple(_truncate_response(output, rollout.response_length) for output in outputs)


def _truncate_response(output: AgentLoopOutput, max_tokens: int) -> AgentLoopOutput:
    """Truncates the response to `max_tokens`."""
    if len(output.response_ids) <= max_tokens:
        return output
    for name in ("response_ids", "response_mask", "response_logprobs", "versions"):
        values = getattr(output, name)
        setattr(output, name, values if values is None else values[:max_tokens])
    return output


def loop_metrics(outputs: Sequence[AgentLoopOutput]) -> dict[str, float]:
    """Returns min, max and mean of the loop metrics under verl's names."""
    measurements = [metric_values(o) for o in outputs]
    summary: dict[str, float] = {}
    for name in LOOP_METRICS:
        values = np.array([float(m[name]) for m in measurements])
        for statistic in ("min", "max", "mean"):
            summary[f"timing_s/agent_loop/{name}/{statistic}"] = float(getattr(values, statistic)())
    metrics = [o.metrics for o in outputs if isinstance(o.metrics, AgentLoopMetrics)]
    if prompt_tokens := sum(m.later_prompt_tokens for m in metrics):
        cached_tokens = sum(m.later_cached_tokens for m in metrics)
        summary["rollout/prefix_cache_hit/later_turns"] = cached_tokens / prompt_tokens
    return summary
