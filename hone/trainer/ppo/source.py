"""The trainer's side of the rollout: starts groups on its workers, and receives their trajectories."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
from hone.data.prompts import collate_fn
from hone.protocol import DataProto
from hone.rollout.contract import trajectory_seed
from hone.types import JsonValue, Row, Settings
from hone.workers.rollout_worker import RolloutWorker

_POLL_S = 0.2
"""The seconds that each rank of a rollout pool waits for a finished group, per call."""


@dataclass(frozen=True)
class GroupMetrics:
    """What the generation of a group measured."""

    loops: Sequence[AgentLoopMetrics | Settings]
    """The metrics of each output."""
    call: Mapping[str, float]
    """The metrics of the worker's call that returned the group; other groups may share the object."""


@dataclass(frozen=True)
class _Group:
    """A group from its start until it is released."""

    rows: DataProto
    """One row per sample."""
    rank: int
    """The leader that runs the group's agent loops."""
    row_indices: tuple[int, ...] = ()
    """The index of each output's row."""
    outputs: tuple[AgentLoopOutput, ...] = ()
    call_metrics: Mapping[str, float] = field(default_factory=dict)

    def select_samples(self, samples: Container[int]) -> tuple[DataProto, list[AgentLoopOutput]]:
        """Returns the rows and outputs of these samples, one row per output."""
        pairs = [
            (index, output)
            for index, output in zip(self.row_indices, self.outputs, strict=True)
            if index in samples
        ]
        indices = [index for index in range(len(self.rows)) if index in samples]
        rows = self.rows if len(indices) == len(self.rows) else self.rows.select_idxs(indices)
        row_of_sample = {sample: row for row, sample in enumerate(indices)}
        repeats = [row_of_sample[index] for index, _ in pairs]
        return repeat_rows_per_output(rows, repeats), [output for _, output in pairs]


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


def generation_metrics(groups: Sequence[GroupMetrics]) -> dict[str, float]:
    """Returns the metrics of the generation of these groups."""
    calls = {id(group.call): group.call for group in groups}.values()
    values_by_name: dict[str, list[float]] = {}
    for metrics in calls:
        for name, value in metrics.items():
            values_by_name.setdefault(name, []).append(value)
    loops = [metrics for group in groups for metrics in group.loops]
    return loop_metrics(loops) | mean_over_ranks(values_by_name)


class TrajectorySource:
    """Generates the trajectories of groups with the published policy, on a rollout worker group."""

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
        self._leader_ranks = workers.mesh(DEFAULT_MESH).collect_ranks  # the ranks with agent loops
        # Ranks that generate between two calls cannot count together how many groups have finished.
        self._generates_between_calls = workers.call(RolloutWorker.weight_transfer) == "streamed"
        self._running: dict[int, _Group] = {}  # by number
        self._finished: dict[int, _Group] = {}  # by number, in finishing order

    def start(
        self, prompts: Mapping[int, Row], samplings: Sequence[Settings], priority: int | None = None
    ) -> None:
        """Starts a group for each prompt, by its number, with one sample for each of the samplings.

        Each group goes to the leader with the fewest running samples. The requests of the oldest group start
        first, unless there is another `priority`.
        """
        rank_requests: list[list[GroupRequest]] = [[] for _ in range(self._workers.world_size)]
        num_running = dict.fromkeys(self._leader_ranks, 0)
        for group in self._running.values():
            num_running[group.rank] += len(group.rows)
        for number, prompt in prompts.items():
            rows = tuple(self._row(prompt, sample_index) for sample_index in range(len(samplings)))
            rank = min(num_running, key=num_running.__getitem__)
            num_running[rank] += len(rows)
            group_priority = number if priority is None else priority
            request = GroupRequest(number, rows, tuple(samplings), group_priority)
            rank_requests[rank].append(request)
            self._running[number] = _Group(DataProto(None, collate_fn(rows)), rank)
        self._workers.call_each(RolloutWorker.submit, rank_requests)

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

    def finish(
        self, num_groups: int | None = None, numbers: Collection[int] | None = None
    ) -> list[int]:
        """Waits until `num_groups` of the running groups (None: all) have finished; the others continue.

        With `numbers`, only these groups count. Returns the numbers of the groups that have finished since
        the last call, in finishing order.
        """
        awaited = {*self._running} if numbers is None else {*numbers} & self._running.keys()
        num_left = len(awaited) if num_groups is None else min(num_groups, len(awaited))
        awaited_numbers = None if numbers is None else awaited
        finished_numbers: list[int] = []
        while num_left > 0:
            # If leaders do not count together, none may wait for a number of groups, because another may
            # finish first; each returns the groups that finish within _POLL_S.
            waits_for_all = num_left == len(awaited & self._running.keys())
            polls = self._generates_between_calls and len(self._leader_ranks) > 1
            groups_needed = None if waits_for_all or polls else num_left
            for result in self._workers.call_all(
                RolloutWorker.pop_finished_groups, groups_needed, _POLL_S, awaited_numbers
            ):
                for finished in result.groups:
                    self._finished[finished.number] = replace(
                        self._running.pop(finished.number),
                        row_indices=finished.row_indices,
                        outputs=finished.outputs,
                        call_metrics=result.metrics,
                    )
                    finished_numbers.append(finished.number)
                    num_left -= 1
        return finished_numbers

    def rows(self, numbers: Sequence[int], samples: Container[int] | None = None) -> DataProto:
        """Returns the trajectories of finished groups, in the order of `numbers`.

        With `samples`, only these samples of each group.
        """
        groups = [self._finished[number] for number in numbers]
        selected = [group.select_samples(samples or range(len(group.rows))) for group in groups]
        outputs = [output for _, group_outputs in selected for output in group_outputs]
        trajectories = collate_outputs(outputs, pad_token_id=self._pad_token_id)
        if not self._keep_log_probs:
            trajectories.batch.pop("rollout_log_probs", None)
        batch = DataProto.concat(fill_object_columns([rows for rows, _ in selected]))
        trajectory_row_column = {TRAJECTORY_ROW} & batch.non_tensor_batch.keys()
        batch.meta_info["loop_columns"] = sorted(
            {*trajectories.non_tensor_batch, *trajectory_row_column}
        )
        return batch.union(trajectories)

    def metrics(self, numbers: Sequence[int], samples: Container[int]) -> list[GroupMetrics]:
        """Returns what the generation of these samples of finished groups measured."""
        groups = [self._finished[number] for number in numbers]
        return [
            GroupMetrics(
                [output.metrics for output in group.select_samples(samples)[1]], group.call_metrics
            )
            for group in groups
        ]

    def generate(self, prompts: Mapping[int, Row], samplings: Sequence[Settings]) -> DataProto:
        """Generates these groups before all others, and returns their trajectories."""
        self.start(prompts, samplings, priority=-1)
        self.finish(numbers=prompts.keys())
        batch = self.rows([*prompts])
        self.release(prompts)
        return batch

    def release(self, numbers: Iterable[int]) -> None:
        """Forgets finished groups."""
        for number in numbers:
            del self._finished[number]

    def abort(self, numbers: Collection[int]) -> None:
        """Drops these groups if they still run; they are never returned."""
        running = [number for number in numbers if self._running.pop(number, None) is not None]
        if running:
            self._workers.call_all(RolloutWorker.abort, running)


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
