"""The loop runner: rows in, trajectories out, every row through its own loop at the same time.

The runner owns the seed of each trajectory: (run seed, uid, sample index), so that the tokens of a row
do not depend on which rows run beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hone.agents.bounded import bounded
from hone.agents.collate import collate_outputs
from hone.agents.contract import AgentLoopOutput, ServerManager
from hone.agents.loops.listing import LoopFactory, LoopNames
from hone.agents.output_check import MEASURED, check_output, measured
from hone.config import PPOTrainerConfig
from hone.controller.phase_deadlines import PhaseDeadlines
from hone.ops.counter_rng import trajectory_seed
from hone.protocol import DataProto
from hone.rollout.contract import RolloutEngine


class AgentLoopFailed(RuntimeError):
    """A loop raised; the message says which loop, on which row, and what."""


Widths = Callable[[int, int], tuple[int, int]]
"""(longest prompt, longest response) here to the widths to pad to: ranks agree on the largest."""


class LoopRunner:
    """Runs agent loops beside one rollout engine."""

    def __init__(
        self,
        config: PPOTrainerConfig,
        engine: RolloutEngine,
        tokenizer: Any,
        *,
        run_seed: int,
        vocabulary: int | None = None,
    ) -> None:
        """`vocabulary`: how many token ids the model knows; without it only their sign is checked."""
        self._config = config
        self._engine = engine
        self._tokenizer = tokenizer
        self._run_seed = run_seed
        self._vocabulary = vocabulary
        self._deadlines = PhaseDeadlines(
            config.trainer.phase_deadline_floor_s, config.trainer.phase_deadline_factor
        )
        self._loops = LoopNames(config.actor_rollout_ref.rollout)

    def run(self, rows: DataProto, *, widths: Widths | None = None) -> DataProto:
        """One trajectory for each row; `meta_info` says how to sample (`sampling_params`)."""
        outputs = self._engine.play(self._run_all(rows))
        width = max(len(o.prompt_ids) for o in outputs)
        length = max(len(o.response_ids) for o in outputs)
        if widths is not None:
            width, length = widths(width, length)
        batch = collate_outputs(
            outputs,
            pad_token_id=self._tokenizer.pad_token_id,
            prompt_width=width,
            response_width=length,
        )
        if not self._config.actor_rollout_ref.rollout.calculate_log_probs:
            batch.batch.pop("rollout_log_probs", None)
        batch.meta_info["metrics"] = _summary(outputs)
        return batch

    async def _run_all(self, rows: DataProto) -> list[AgentLoopOutput]:
        sampling = rows.meta_info["sampling_params"]
        columns = rows.non_tensor_batch
        given = columns.get("agent_name", [None] * len(rows))
        names = [self._loops.of_row(name) for name in given]
        factories = {name: self._loops.factory(name) for name in set(names)}
        tasks = [
            asyncio.create_task(
                self._run_one(
                    name,
                    factories[name],
                    {k: v[i] for k, v in columns.items()},
                    dict(sampling),
                )
            )
            for i, name in enumerate(names)
        ]
        with self._deadlines.measured("agent loops") as limit_s:
            done = await _ended(tasks, limit_s)
            late = [columns["uid"][i] for i, task in enumerate(tasks) if task not in done]
            if late:
                raise AgentLoopFailed(
                    f"{len(late)} of {len(tasks)} agent loops had not ended after {limit_s:g} s, the "
                    f"first on row uid={late[0]}; give what it waits for a deadline of its own "
                    f"(asyncio.wait_for), or {self._deadlines.advice('agent loops')}"
                )
        return [task.result() for task in tasks]

    async def _run_one(
        self, name: str, factory: LoopFactory, row: Mapping[str, Any], sampling: dict[str, Any]
    ) -> AgentLoopOutput:
        rollout = self._config.actor_rollout_ref.rollout
        manager = ServerManager(
            self._engine,
            seed=trajectory_seed(self._run_seed, row["uid"], row["sample_index"]),
            max_tokens=rollout.response_length,
        )

        async def trajectory() -> AgentLoopOutput:
            loop = factory(self._config, manager, self._tokenizer, None)
            output = await loop.run(sampling, **row)
            check_output(output, name, row=row, vocabulary=self._vocabulary)
            return output

        try:
            # A cancelled loop has the time of a call to release its tools.
            grace_s = rollout.multi_turn.tool_timeout_s
            output = await bounded(trajectory(), None, grace_s=grace_s)
        except Exception as error:
            raise AgentLoopFailed(
                f"agent loop {name!r} failed on row uid={row['uid']} sample {row['sample_index']}: "
                f"{type(error).__name__}: {error}"
            ) from error
        # Columns of the row that the loop handed through are in the batch already.
        output.extra_fields = {k: v for k, v in output.extra_fields.items() if k not in row}
        return _cut(output, rollout.response_length)


async def _ended(tasks: Sequence[asyncio.Task[Any]], limit_s: float) -> set[asyncio.Task[Any]]:
    """Those that ended in time; the others are cancelled. The first to fail ends all and is raised."""
    try:
        done, _ = await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # each ends within its grace time
    for task in tasks:
        if task in done:
            task.result()
    return done


def _cut(output: AgentLoopOutput, longest: int) -> AgentLoopOutput:
    """No response is longer than `max_response_length`; what a loop wrote beyond it is dropped."""
    if len(output.response_ids) <= longest:
        return output
    output.response_ids = output.response_ids[:longest]
    output.response_mask = output.response_mask[:longest]
    if output.response_logprobs is not None:
        output.response_logprobs = output.response_logprobs[:longest]
    if output.versions is not None:
        output.versions = output.versions[:longest]
    return output


def _summary(outputs: list[AgentLoopOutput]) -> dict[str, float]:
    """min, max and mean of what loops measured, by the family's metric names."""
    found = [measured(o) for o in outputs]
    summary: dict[str, float] = {}
    for name in MEASURED:
        values = np.array([float(m[name]) for m in found])
        for statistic in ("min", "max", "mean"):
            summary[f"timing_s/agent_loop/{name}/{statistic}"] = float(getattr(values, statistic)())
    return summary
