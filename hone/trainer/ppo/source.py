"""The trainer's side of the rollout: starts groups on its workers, and receives their trajectories."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from torch import Tensor

from hone.agents.collate import (
    TRAJECTORY_ROW,
    collate_outputs,
    fill_object_columns,
    loop_metrics,
    repeat_rows_per_output,
)
from hone.agents.contract import AgentLoopMetrics, AgentLoopOutput
from hone.agents.groups import GroupRequest
from hone.controller import WorkerGroup
from hone.controller.contract import DEFAULT_MESH
from hone.data.loader import PromptLoader
from hone.data.prompts import collate_fn
from hone.protocol import DataProto
from hone.protocol.rows import row_dicts
from hone.rollout.contract import trajectory_seed
from hone.types import JsonValue, Row, Settings
from hone.workers.rollout_worker import RolloutWorker

_POLL_S = 0.2
"""The seconds that each rank of a rollout pool waits for a finished group, per call."""


@dataclass(frozen=True)
class _Group:
    """The rows of one prompt, from submission until they are taken."""

    rows: DataProto
    sampling: Settings
    rank: int
    """The leader that runs the group's agent loops."""
    outputs: tuple[AgentLoopOutput, ...] = ()


def mean_over_ranks(metrics: Mapping[str, float | list[float]]) -> dict[str, float]:
    """Averages the metrics of workers over ranks; a list has one value per rank."""
    return {
        name: float(sum(value) / len(value)) if isinstance(value, list) else float(value)
        for name, value in metrics.items()
    }


def mean_max_min(name: str, values: Tensor) -> dict[str, float]:
    """Returns mean, max and min; empty if there are no values."""
    if values.numel() == 0:
        return {}
    values = values.float()
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def traffic_metrics(counters: Iterable[Counter[str]]) -> dict[str, float]:
    """Returns the bytes that each worker method has sent and returned, and their sum; clears the counters."""
    total: Counter[str] = Counter({"weights": 0})  # reported even if it is 0
    # Roles may share a worker group and its counter.
    unique_counters = {id(counter): counter for counter in counters}
    for counter in unique_counters.values():
        total.update(counter)
        counter.clear()
    metrics = {
        f"traffic/{key}_bytes": float(count)
        for key, count in total.items()
        if count or key == "weights"
    }
    return metrics | {"traffic/step_bytes": float(total.total())}


class TrajectorySource:
    """Generates trajectories of the published policy with a rollout worker group."""

    def __init__(
        self,
        workers: WorkerGroup[RolloutWorker],
        *,
        run_seed: int,
        pad_token_id: int,
        keep_log_probs: bool,
    ) -> None:
        self._workers = workers
        self._run_seed = run_seed
        self._pad_token_id, self._keep_log_probs = pad_token_id, keep_log_probs
        self.weight_transfer = workers.call(RolloutWorker.weight_transfer)
        self._leader_ranks = workers.mesh(DEFAULT_MESH).collect_ranks  # the ranks with agent loops
        self._running_groups: dict[int, _Group] = {}  # by number, in submission order
        self._finished_groups: dict[int, _Group] = {}  # by number, in finishing order
        self._next_number = 0
        self._loop_metrics: list[AgentLoopMetrics | Settings] = []
        self._rank_metrics: list[dict[str, float]] = []

    @property
    def generates_concurrently(self) -> bool:
        """Whether generation continues while the training loop scores or updates."""
        return self.weight_transfer != "gathered"

    @property
    def pending(self) -> int:
        """The number of groups that were submitted and not taken."""
        return len(self._running_groups) + len(self._finished_groups)

    def submit(
        self, prompts: Mapping[str, np.ndarray], *, samples: int, sampling: Settings
    ) -> range:
        """Starts `samples` responses to each prompt row; returns the numbers of the groups.

        Each group goes to the leader with the fewest running samples.
        """
        first_number = self._next_number
        rank_requests: list[list[GroupRequest]] = [[] for _ in range(self._workers.world_size)]
        num_running = dict.fromkeys(self._leader_ranks, 0)
        for group in self._running_groups.values():
            num_running[group.rank] += len(group.rows)
        for prompt in row_dicts(prompts):
            rows = tuple(self._row(prompt, sample_index) for sample_index in range(samples))
            rank = min(num_running, key=num_running.__getitem__)
            num_running[rank] += samples
            number, self._next_number = self._next_number, self._next_number + 1
            rank_requests[rank].append(GroupRequest(number, rows, (sampling,) * samples))
            group_rows = DataProto(None, collate_fn(rows))
            self._running_groups[number] = _Group(group_rows, sampling, rank)
        self._workers.call_each(RolloutWorker.submit, rank_requests)
        return range(first_number, self._next_number)

    def _row(self, prompt: Row, sample_index: int) -> Row:
        """Returns the row of one sample of a prompt."""
        uid = prompt["uid"]
        # The loop runner computes the same seed; the column stores it for a replay.
        return {
            **prompt,
            "sample_index": sample_index,
            "trajectory_id": f"{uid}-{sample_index}",
            "seed": trajectory_seed(self._run_seed, uid, sample_index),
        }

    def take(self, n_groups: int | None = None) -> DataProto:
        """Returns the first `n_groups` groups to finish, in submission order; the other groups continue.

        None returns all submitted groups.
        """
        num_groups = self.pending if n_groups is None else min(n_groups, self.pending)
        while len(self._finished_groups) < num_groups:
            # With several leaders, none may wait for a number of groups, because another may finish first;
            # each returns the groups that finish within _POLL_S.
            has_one_leader = len(self._leader_ranks) == 1
            groups_needed = num_groups - len(self._finished_groups) if has_one_leader else None
            for result in self._workers.call_all(
                RolloutWorker.pop_finished_groups, groups_needed, _POLL_S
            ):
                for finished in result.groups:
                    group = self._running_groups.pop(finished.number)
                    rows = repeat_rows_per_output(group.rows, finished.row_indices)
                    group = replace(group, rows=rows, outputs=finished.outputs)
                    self._finished_groups[finished.number] = group
                if result.metrics:
                    self._rank_metrics.append(result.metrics)
        numbers = sorted(islice(self._finished_groups, num_groups))
        groups = [self._finished_groups.pop(number) for number in numbers]
        outputs = [output for group in groups for output in group.outputs]
        trajectories = collate_outputs(outputs, pad_token_id=self._pad_token_id)
        if not self._keep_log_probs:
            trajectories.batch.pop("rollout_log_probs", None)
        batch = DataProto.concat(fill_object_columns([group.rows for group in groups]))
        batch.meta_info["group_numbers"] = numbers
        trajectory_row_column = {TRAJECTORY_ROW} & batch.non_tensor_batch.keys()
        batch.meta_info["loop_columns"] = sorted(
            {*trajectories.non_tensor_batch, *trajectory_row_column}
        )
        self._loop_metrics += [output.metrics for output in outputs]
        return batch.union(trajectories)

    def pop_metrics(self) -> dict[str, float]:
        """Returns the metrics of generation, over all groups that were taken since the last call."""
        loops, self._loop_metrics = self._loop_metrics, []
        ranks, self._rank_metrics = self._rank_metrics, []
        values_by_name: dict[str, list[float]] = {}
        for metrics in ranks:
            for name, value in metrics.items():
                values_by_name.setdefault(name, []).append(value)
        return (loop_metrics(loops) if loops else {}) | mean_over_ranks(values_by_name)

    def abort(self) -> None:
        """Drops all groups that were submitted and not taken."""
        self._workers.call_all(RolloutWorker.abort, None)
        self._running_groups, self._finished_groups = {}, {}

    def state_dict(self) -> list[Settings]:
        """Returns the groups that were submitted and not taken, with the positions of their prompts."""
        groups = {**self._running_groups, **self._finished_groups}
        return [
            {
                "index": int(group.rows.non_tensor_batch["dataset_index"][0]),
                "uid": str(group.rows.non_tensor_batch["uid"][0]),
                "samples": int(group.rows.non_tensor_batch["sample_index"][-1]) + 1,
                "sampling": dict(group.sampling),
            }
            for _, group in sorted(groups.items())
        ]

    def load_state_dict(self, state: Sequence[Settings], loader: PromptLoader) -> None:
        """Submits the groups of the checkpoint again; their seeds give the same trajectories."""
        for group in state:
            prompts = loader.load_batch([(group["index"], group["uid"])])
            self.submit(prompts, samples=group["samples"], sampling=group["sampling"])


def env_metric_columns(batch: DataProto) -> list[str]:
    """Returns the names of numeric columns that agent loops wrote with the prefix `env/`."""
    arrays, names = batch.non_tensor_batch, batch.meta_info.get("loop_columns", ())
    return [name for name in names if name.startswith("env/") and are_numbers(arrays[name])]


def are_numbers(values: Iterable[JsonValue]) -> bool:
    """Returns whether there are values besides None, and all of them are numbers that fit a float."""
    numbers = [value for value in values if value is not None]
    return bool(numbers) and all(map(_is_number, numbers))


def _is_number(value: JsonValue) -> bool:
    if isinstance(value, int):
        return abs(value) <= sys.float_info.max
    return isinstance(value, (float, np.bool_, np.number))
