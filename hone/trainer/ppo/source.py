"""The trajectory source: `submit` prompts, `take` finished groups.

Synchronous training takes all it submitted. Dynamic sampling, staleness and partial rollouts are other
ways to call the same two verbs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hone.columns import write
from hone.controller import WorkerGroup
from hone.ops.counter_rng import trajectory_seed
from hone.protocol import DataProto
from hone.trainer.ppo.widths import concat_padded


class TrajectorySource:
    """Trajectories of the current policy, through a rollout worker group."""

    def __init__(self, workers: WorkerGroup, *, run_seed: int) -> None:
        self._workers = workers
        self._run_seed = run_seed
        self._pending: list[DataProto] = []

    def submit(
        self, prompts: Mapping[str, np.ndarray], *, samples: int, sampling: Mapping[str, Any]
    ) -> None:
        """Ask for `samples` responses to each prompt row."""
        rows = DataProto(batch=None, non_tensor_batch=dict(prompts)).repeat(
            samples, interleave=True
        )
        index = np.tile(np.arange(samples), len(rows) // samples).astype(object)
        write(rows, "sample_index", index)
        uids = rows.non_tensor_batch["uid"]
        attempts = list(zip(uids, index, strict=True))
        names = [f"{uid}-{i}" for uid, i in attempts]
        write(rows, "trajectory_id", np.array(names, dtype=object))
        # What the loop runner folds into the sampling of each trajectory: kept for a replay.
        seeds = [trajectory_seed(self._run_seed, uid, i) for uid, i in attempts]
        write(rows, "seed", np.array(seeds, dtype=object))
        rows.meta_info["sampling_params"] = dict(sampling)
        self._pending.append(rows)

    def take(self) -> DataProto:
        """All trajectories submitted so far, in the order of submission."""
        finished = [self._play(rows) for rows in self._pending]
        self._pending.clear()
        return finished[0] if len(finished) == 1 else concat_padded(finished)

    def _play(self, rows: DataProto) -> DataProto:
        played = self._workers.generate_sequences(rows)
        batch = rows.select(meta_info_keys=[])
        batch.meta_info["loop_facts"] = sorted(played.non_tensor_batch)
        return batch.union(played)
