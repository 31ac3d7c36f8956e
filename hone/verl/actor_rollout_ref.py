"""verl's ActorRolloutRefWorker: actor, rollout and reference in one worker, with verl's methods.

Hand-written training loops and verl's role mappings use this worker. They pass prompt tensors or chat
messages, and sampling parameters in `meta_info`; uids are optional.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from typing import Any, ClassVar

import numpy as np

from hone.agents.collate import DERIVED_COLUMNS, LOOP_SCORE_COLUMN, collate_outputs, loop_metrics
from hone.agents.contract import default_sampling, validation_sampling
from hone.agents.groups import GroupRequest
from hone.agents.joining import join_ranks
from hone.columns import write
from hone.config.block import Block
from hone.controller import Dispatch, Worker, register
from hone.controller.contract import DEFAULT_MESH, ArgumentsPerRank, Batch, WorkerGroupLike
from hone.controller.dispatch import dispatch_nd_compute_dataproto
from hone.protocol import DataProto, object_array
from hone.protocol.rows import row_dicts
from hone.types import Function
from hone.workers.actor import ActorWorker, ReferenceWorker
from hone.workers.rollout_worker import RolloutWorker
from hone.workers.train_worker import TrainWorker, full_config

HAS_GENERATED_UIDS = "generated_uid"
"""The key in `meta_info` of a batch whose uids this module has generated."""
ROLLOUT_MESH = "rollout"
"""The mesh on which every rank decodes its own rows, even if several ranks update with the same rows."""


def dispatch_prompts(group: WorkerGroupLike, prompts: DataProto) -> ArgumentsPerRank[Batch]:
    """Dispatch function that adds ids before rows are split, so that no two rows share a seed."""
    return dispatch_nd_compute_dataproto(ROLLOUT_MESH, group, with_row_ids(prompts))


def collect_trajectories(group: WorkerGroupLike, results: list[DataProto]) -> DataProto:
    """Collect function that joins the batches of the ranks that run agent loops."""
    return join_ranks(group, [results[rank] for rank in group.mesh(ROLLOUT_MESH).collect_ranks])


def with_row_ids(prompts: DataProto) -> DataProto:
    """Returns the rows without tensors; adds columns `uid`, `sample_index` and, if known, `prompt_ids`."""
    columns, meta_info = dict(prompts.non_tensor_batch), dict(prompts.meta_info)
    # Rows without a known prompt are told apart by their index.
    row_prompts: Iterable[object] = columns.get("raw_prompt", range(len(prompts)))
    prompt_ids = _prompt_ids(prompts)
    if prompt_ids is not None:
        columns["prompt_ids"] = object_array(prompt_ids)
        row_prompts = prompt_ids
    if "uid" not in columns:
        digests = [hashlib.blake2b(repr(p).encode(), digest_size=8) for p in row_prompts]
        columns["uid"] = np.array([digest.hexdigest() for digest in digests], dtype=object)
        meta_info[HAS_GENERATED_UIDS] = True
    if "sample_index" not in columns:
        counters: defaultdict[str, count[int]] = defaultdict(count)
        indices = [next(counters[uid]) for uid in columns["uid"]]
        columns["sample_index"] = np.array(indices, dtype=object)
    return DataProto(None, columns, meta_info)


def _prompt_ids(rows: DataProto) -> list[list[int]] | None:
    """Returns the prompt tokens without padding, or None if the batch has only text."""
    columns = rows.non_tensor_batch
    for name in ("prompt_ids", "raw_prompt_ids"):
        if name in columns:
            return [list(ids) for ids in columns[name]]
    for name in ("input_ids", "prompts"):
        if rows.has_column(name) and rows.has_column("attention_mask"):
            pairs = zip(rows.batch[name], rows.batch["attention_mask"].bool(), strict=True)
            return [ids[: len(mask)][mask[: len(ids)]].tolist() for ids, mask in pairs]
    return None


def add_verl_columns(batch: DataProto) -> DataProto:
    """Adds columns that code written for verl reads: `input_ids`, `position_ids`, `rm_scores`."""
    for name, compute in DERIVED_COLUMNS.items():
        write(batch, name, compute(batch))
    if batch.has_column(LOOP_SCORE_COLUMN):
        write(batch, "rm_scores", batch.column(LOOP_SCORE_COLUMN))
    return batch


def _delegate(member: str, method: Function) -> Function:
    """Returns a method that calls `method` of the member with this name."""

    @functools.wraps(method)  # copies the registration
    def forward(worker: ActorRolloutRefWorker, *args: Any, **kwargs: Any) -> Any:
        return method(worker.members[member], *args, **kwargs)

    return forward


class ActorRolloutRefWorker(Worker):
    """A worker whose `role` is `actor_rollout`, `actor_rollout_ref` (with a reference) or `ref`."""

    takes_role: ClassVar[bool] = True

    def __init__(self, config: Block, role: str = "actor_rollout_ref") -> None:
        super().__init__()
        self.config = config = full_config(config)
        self._call_count = 0
        actor_is_reference = config.actor_rollout_ref.model.uses_lora and "actor" in role
        self.members: dict[str, Worker] = {}
        self.reference: ActorWorker | ReferenceWorker
        """The reference worker; with LoRA, the actor with its adapters disabled."""
        if "actor" in role:
            self.actor = self.reference = ActorWorker(config)
            self.rollout = RolloutWorker(config)
            self.members |= {"actor": self.actor, "rollout": self.rollout}
            self.register_mesh(ROLLOUT_MESH, *self.rollout.mesh_slot(DEFAULT_MESH))
        if "ref" in role and not actor_is_reference:
            self.members["ref"] = self.reference = ReferenceWorker(config)
        for member in self.members.values():
            member.set_colocated(self.members)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        if "actor" in self.members:
            self.actor.init_model()
            self.rollout.init_model()
        if "ref" in self.members:
            self.reference.init_model()
        members = self.members.values()
        meshes = {member.engine.mesh for member in members if isinstance(member, TrainWorker)}
        mesh, *other_meshes = meshes
        if other_meshes:  # all engines get the same rows
            raise ValueError(
                f"actor and reference have different meshes ({mesh}, {other_meshes[0]}); give both the same "
                "strategy, or put them in separate workers"
            )
        self.register_mesh(DEFAULT_MESH, mesh.data_parallel_rank, mesh.is_collector)

    @register(
        dispatch_mode=replace(
            Dispatch.DP_COMPUTE_PROTO,
            dispatch_fn=dispatch_prompts,
            collect_fn=collect_trajectories,
            collects_per_slot=False,
        )
    )
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generates one trajectory per row with the row's agent loop."""
        self._call_count += 1
        rows, meta_info = with_row_ids(prompts), prompts.meta_info
        columns, rollout = rows.non_tensor_batch, self.config.actor_rollout_ref.rollout
        if rows.meta_info.get(HAS_GENERATED_UIDS):
            # The call number makes the next call with the same prompts sample other responses.
            uids = [f"{uid}-{self._call_count}" for uid in columns["uid"]]
            columns["uid"] = np.array(uids, dtype=object)
        samples = zip(columns["uid"], columns["sample_index"], strict=True)
        columns["trajectory_id"] = np.array([f"{uid}-{i}" for uid, i in samples], dtype=object)
        is_validation = meta_info.get("validate")
        sampling = validation_sampling(rollout) if is_validation else default_sampling(rollout)
        if not meta_info.get("do_sample", True):
            sampling["temperature"] = 0.0
        sampling = dict(meta_info.get("sampling_params", sampling))
        numbers = range(-len(rows), 0)  # never those of a trainer's groups
        if self.rollout.is_leader:
            pairs = zip(numbers, row_dicts(columns), strict=True)
            self.rollout.submit(
                [GroupRequest(number, (row,), (sampling,)) for number, row in pairs]
            )
        result = self.rollout.pop_finished_groups(None, 0.0, numbers)
        if not self.rollout.is_leader:
            return DataProto()
        groups = sorted(result.groups, key=lambda group: group.number)
        outputs = [output for group in groups for output in group.outputs]
        if len(outputs) > len(rows):
            raise ValueError(
                "an agent loop returned several rows for a trajectory, and generate_sequences returns "
                "one row per prompt row; train with hone.trainer.main_ppo"
            )
        batch = collate_outputs(outputs, pad_token_id=self.actor.tokenizer.pad_token_id)
        if not rollout.calculate_log_probs:
            batch.batch.pop("rollout_log_probs", None)
        metrics = loop_metrics([output.metrics for output in outputs])
        batch.meta_info["metrics"] = metrics | result.metrics
        batch.meta_info["temperature"] = rollout.temperature
        return add_verl_columns(batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto, *, with_sum_pi_squared: bool = False) -> DataProto:
        return self.actor.compute_log_prob(
            data, with_sum_pi_squared=with_sum_pi_squared, temperature=_temperature(data)
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        return self.reference.compute_ref_log_prob(data, temperature=_temperature(data))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto, *, total_rows: int | None = None) -> DataProto:
        """Runs all updates of this step and then updates the rollout weights, as verl does."""
        temperature = _temperature(data)
        result = self.actor.update_actor(data, total_rows=total_rows, temperature=temperature)
        self.rollout.switch_to_actor_weights(self.actor.version())
        return result

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        self.actor.load_checkpoint(folder)
        self.rollout.switch_to_actor_weights(self.actor.version())

    save_checkpoint = _delegate("actor", ActorWorker.save_checkpoint)
    version = _delegate("actor", ActorWorker.version)
    dtype = _delegate("actor", ActorWorker.dtype)
    token_log_probs = _delegate("actor", ActorWorker.token_log_probs)
    submit = _delegate("rollout", RolloutWorker.submit)
    pop_finished_groups = _delegate("rollout", RolloutWorker.pop_finished_groups)
    abort = _delegate("rollout", RolloutWorker.abort)
    probe = _delegate("rollout", RolloutWorker.probe)
    weight_transfer = _delegate("rollout", RolloutWorker.weight_transfer)
    switch_to_actor_weights = _delegate("rollout", RolloutWorker.switch_to_actor_weights)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Stops the rollout engine, if there is one."""
        if "rollout" in self.members:
            self.rollout.close()


def _temperature(data: DataProto) -> float | None:
    """Returns the temperature that a loop written for verl passes in the batch, or None."""
    return data.meta_info.get("temperature")
