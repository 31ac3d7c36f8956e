"""The trainer's side of the rollout: receives trajectories, and sends weights."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hone.agents.collate import (
    TRAJECTORY_ROW,
    collate_outputs,
    fill_object_columns,
    loop_metrics,
    repeat_rows_per_output,
)
from hone.agents.contract import AgentLoopMetrics, AgentLoopOutput
from hone.columns import write
from hone.config.rollout import CheckpointEngineConfig
from hone.controller import WorkerGroup
from hone.controller.contract import DEFAULT_MESH
from hone.data.loader import PromptLoader
from hone.protocol import DataProto
from hone.rollout.contract import trajectory_seed
from hone.types import JsonValue, Settings
from hone.weights.streamed import choose_transport
from hone.workers.actor import ActorWorker
from hone.workers.rollout_worker import RolloutWorker

_POLL_S = 0.2
"""The seconds that each rank of a rollout pool waits for a finished group, per call."""


@dataclass(frozen=True)
class _Group:
    """The rows of one prompt, from submission until they are taken."""

    number: int
    """The position in submission order."""
    rows: DataProto
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
        # The number of submissions to each rank; the rank's loop runner keeps the same count.
        self._submissions = [0] * workers.world_size
        # By rank, submission number on that rank, and uid.
        self._running_groups: dict[tuple[int, int, str], _Group] = {}
        self._finished_groups: list[_Group] = []  # in finishing order
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
        """Starts `samples` responses to each prompt row; returns the numbers of the groups."""
        rows = DataProto(None, dict(prompts)).repeat(samples, interleave=True)
        sample_indices = np.tile(np.arange(samples), len(rows) // samples).astype(object)
        write(rows, "sample_index", sample_indices)
        pairs = list(zip(rows.non_tensor_batch["uid"], sample_indices, strict=True))
        trajectory_ids = [f"{uid}-{sample_index}" for uid, sample_index in pairs]
        write(rows, "trajectory_id", np.array(trajectory_ids, dtype=object))
        # The loop runner computes the same seeds; the column stores them for a replay.
        seeds = [trajectory_seed(self._run_seed, *pair) for pair in pairs]
        write(rows, "seed", np.array(seeds, dtype=object))
        rows.meta_info["sampling_params"] = dict(sampling)
        first_number = self._next_number
        rank_rows: list[DataProto | None] = [None] * self._workers.world_size
        indices_by_rank = np.array_split(np.arange(len(rows) // samples), len(self._leader_ranks))
        for rank, group_indices in zip(self._leader_ranks, indices_by_rank, strict=True):
            if not len(group_indices):
                continue
            first, last = int(group_indices[0]), int(group_indices[-1])
            rank_rows[rank] = rows.slice(first * samples, (last + 1) * samples)
            self._submissions[rank] += 1
            for group_index in group_indices:
                group_rows = rows.slice(int(group_index) * samples, int(group_index + 1) * samples)
                key = rank, self._submissions[rank], str(group_rows.non_tensor_batch["uid"][0])
                self._running_groups[key] = _Group(self._next_number, group_rows)
                self._next_number += 1
        self._workers.call_each(RolloutWorker.submit, rank_rows)
        return range(first_number, self._next_number)

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
            rank_results = self._workers.call_all(
                RolloutWorker.pop_finished_groups, groups_needed, _POLL_S
            )
            for rank, result in enumerate(rank_results):
                for group in result.groups:
                    submitted_group = self._running_groups.pop((rank, group.submission, group.uid))
                    rows = repeat_rows_per_output(submitted_group.rows, group.row_indices)
                    number = submitted_group.number
                    self._finished_groups.append(_Group(number, rows, group.outputs))
                if result.metrics:
                    self._rank_metrics.append(result.metrics)
        groups = sorted(self._finished_groups[:num_groups], key=lambda group: group.number)
        del self._finished_groups[:num_groups]
        outputs = [output for group in groups for output in group.outputs]
        trajectories = collate_outputs(outputs, pad_token_id=self._pad_token_id)
        if not self._keep_log_probs:
            trajectories.batch.pop("rollout_log_probs", None)
        batch = DataProto.concat(fill_object_columns([group.rows for group in groups]))
        batch = batch.select(meta_info_keys=[])
        batch.meta_info["group_numbers"] = [group.number for group in groups]
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
        self._running_groups, self._finished_groups = {}, []

    def state_dict(self) -> list[Settings]:
        """Returns the groups that were submitted and not taken, with the positions of their prompts."""
        groups = sorted(
            [*self._running_groups.values(), *self._finished_groups], key=lambda group: group.number
        )
        return [
            {
                "index": int(group.rows.non_tensor_batch["dataset_index"][0]),
                "uid": str(group.rows.non_tensor_batch["uid"][0]),
                "samples": int(group.rows.non_tensor_batch["sample_index"][-1]) + 1,
                "sampling": dict(group.rows.meta_info["sampling_params"]),
            }
            for group in groups
        ]

    def load_state_dict(self, state: Sequence[Settings], loader: PromptLoader) -> None:
        """Submits the groups of the checkpoint again; their seeds give the same trajectories."""
        for group in state:
            prompts = loader.load_batch([(group["index"], group["uid"])])
            self.submit(prompts, samples=group["samples"], sampling=group["sampling"])


class Publisher:
    """Sends weights from the actor's workers to the rollout's workers: shared, gathered or streamed."""

    def __init__(
        self,
        actor: WorkerGroup[ActorWorker],
        rollout: WorkerGroup[RolloutWorker],
        config: CheckpointEngineConfig,
    ) -> None:
        self._actor, self._rollout = actor, rollout
        self.weight_transfer = rollout.call(RolloutWorker.weight_transfer)
        self.published = 0
        """How often new weights were published; staleness counts these publications."""
        self._publish_number_of_version: dict[int, int] = {}
        self._published_before_update = 0
        self._transport = ""
        if self.weight_transfer == "streamed":
            self._sends_adapters = rollout.call(RolloutWorker.takes_adapters)
            sender = actor.call(ActorWorker.location)
            receivers = rollout.call_all(RolloutWorker.location)
            self._transport = choose_transport(sender, receivers, config.backend)

    def publish(self) -> dict[str, float]:
        """Sends the new weights, and returns the number of bytes sent as a metric."""
        actor, rollout, receivers = self._actor, self._rollout, 1
        version = actor.call(ActorWorker.version)
        if self.weight_transfer == "streamed":
            receivers = rollout.world_size
            address = actor.call(ActorWorker.offer_weights, self._transport, receivers)
            receive_call = rollout.begin(RolloutWorker.receive_weights, address, version)
            try:
                num_bytes = sum(actor.call_all(ActorWorker.send_weights, self._sends_adapters))
            except Exception:
                receive_call.get()  # raises the receiver's error, if there is one
                raise
            receive_call.get()
        else:
            num_bytes = sum(rollout.call_all(RolloutWorker.switch_to_actor_weights, version))
        rollout.traffic["weights"] += num_bytes * receivers
        self._published_before_update = self.published
        # If all updates were skipped, the version is unchanged, and staleness counts no new publication.
        if version not in self._publish_number_of_version:
            self.published += 1
            self._publish_number_of_version[version] = self.published
        return {"perf/weight_bytes": float(num_bytes)}

    def staleness(self, batch: DataProto) -> dict[str, float]:
        """Returns metrics of the staleness and the span of each trajectory.

        Staleness is the number of publications from the weights that sampled the oldest token to the weights
        before this update. Span is the number from the weights of the oldest token to those of the newest.
        """
        column = batch.non_tensor_batch.get("versions", ())
        versions = [v for v in column if v is not None and len(v)]
        if not versions:
            return {}
        number_of_version = self._publish_number_of_version
        oldest = torch.tensor([number_of_version.get(min(v), 0) for v in versions])
        newest = torch.tensor([number_of_version.get(max(v), 0) for v in versions])
        prefix, staleness = "training/off_policy", self._published_before_update - oldest
        return {
            **mean_max_min(f"{prefix}/trajectory_staleness", staleness),
            **mean_max_min(f"{prefix}/trajectory_spans", newest - oldest),
        }


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
