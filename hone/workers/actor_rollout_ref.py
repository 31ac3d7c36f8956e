"""verl's ActorRolloutRefWorker: actor, rollout and reference in one worker, with verl's method names.

It serves hand-written loops and verl's role mappings. Such loops pass prompt tensors or chat messages, and
sampling parameters in `meta_info`; uids are optional.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from hone.agents.collate import collate_outputs, join_ranks, with_verl_columns
from hone.agents.sampling import training_sampling, validation_sampling
from hone.agents.trajectory import loop_metrics
from hone.config.block import Block
from hone.config.rollout import RolloutConfig
from hone.controller import Dispatch, Worker, register
from hone.controller.decorator import (
    DATA_PARALLEL,
    Batch,
    Group,
    PerRank,
    dispatch_nd_compute_dataproto,
)
from hone.engine.contract import Mesh
from hone.protocol import DataProto, object_array
from hone.types import Function, Row, Settings
from hone.workers.actor import ActorWorker, ReferenceWorker
from hone.workers.rollout_worker import RolloutWorker
from hone.workers.train import TrainWorker, whole_config

MADE_UID = "made_uid"


ROLLOUT = "rollout"
"""The mesh on which every rank decodes rows of its own, also where ranks share the work of an update."""


def split_numbered(group: Group, prompts: DataProto) -> PerRank[Batch]:
    """Dispatch function that numbers rows before they are split, so that no two rows share a seed."""
    return dispatch_nd_compute_dataproto(ROLLOUT, group, numbered(prompts))


def join_slots(group: Group, results: list[DataProto]) -> DataProto:
    """Collect function that joins the batches of the ranks with agent loops."""
    return join_ranks(group, [results[rank] for rank in group.mesh(ROLLOUT).collect_ranks])


def numbered(prompts: DataProto) -> DataProto:
    """Adds `prompt_ids`, `uid` and `sample_index` where the caller has not set them."""
    rows = prompts.select()
    facts = dict(rows.non_tensor_batch)
    ids = _prompt_ids(rows)
    if ids is not None:
        facts["prompt_ids"] = object_array(ids)
    if "uid" not in facts:
        texts = ids if ids is not None else facts.get("raw_prompt", range(len(rows)))
        names = [hashlib.blake2b(repr(t).encode(), digest_size=8).hexdigest() for t in texts]
        facts["uid"] = np.array(names, dtype=object)
        rows.meta_info[MADE_UID] = True
    if "sample_index" not in facts:
        seen: Counter[str] = Counter()
        counts = []
        for uid in facts["uid"]:
            counts.append(seen[uid])
            seen[uid] += 1
        facts["sample_index"] = np.array(counts, dtype=object)
    return DataProto(None, facts, rows.meta_info)


def in_call(rows: DataProto, call: int) -> DataProto:
    """Appends the call number to generated uids, so that the next call draws new samples."""
    facts = dict(rows.non_tensor_batch)
    if rows.meta_info.get(MADE_UID):
        facts["uid"] = np.array([f"{uid}-{call}" for uid in facts["uid"]], dtype=object)
    attempts = zip(facts["uid"], facts["sample_index"], strict=True)
    facts["trajectory_id"] = np.array([f"{uid}-{i}" for uid, i in attempts], dtype=object)
    return DataProto(None, facts, dict(rows.meta_info))


def sampling_of(meta_info: Settings, rollout: RolloutConfig) -> Row:
    """Returns `sampling_params` if given, else the configured ones for `validate` and `do_sample`."""
    if "sampling_params" in meta_info:
        return dict(meta_info["sampling_params"])
    sampling = (validation_sampling if meta_info.get("validate") else training_sampling)(rollout)
    return sampling if meta_info.get("do_sample", True) else sampling | {"temperature": 0.0}


def _prompt_ids(rows: DataProto) -> list[list[int]] | None:
    facts = rows.non_tensor_batch
    for name in ("prompt_ids", "raw_prompt_ids"):
        if name in facts:
            return [list(ids) for ids in facts[name]]
    for name in ("input_ids", "prompts"):
        if rows.has_column(name) and rows.has_column("attention_mask"):
            ids = rows.batch[name]
            mask = rows.batch["attention_mask"][:, : ids.shape[1]]
            return [
                row[: len(seen)][seen.bool()].tolist() for row, seen in zip(ids, mask, strict=True)
            ]
    return None


def _forwarded(member: str, method: Function) -> Function:
    @functools.wraps(method)  # copies the registration
    def forward(worker: ActorRolloutRefWorker, *args: Any, **kwargs: Any) -> Any:
        return method(worker.members[member], *args, **kwargs)

    return forward


class ActorRolloutRefWorker(Worker):
    """A worker whose `role` is `actor_rollout`, `actor_rollout_ref` (with a reference) or `ref`."""

    def __init__(self, config: Block, role: str = "actor_rollout_ref") -> None:
        super().__init__()
        self.config = config = whole_config(config)
        self._calls = 0
        lora = config.actor_rollout_ref.model.uses_lora and "actor" in role
        self.members: dict[str, Worker] = {}
        if "actor" in role:
            self.members["actor"] = ActorWorker(config)
            self.members["rollout"] = rollout = RolloutWorker(config)
            self.register_mesh(ROLLOUT, *rollout.mesh_place(DATA_PARALLEL))
        if "ref" in role and not lora:
            self.members["ref"] = ReferenceWorker(config)
        for member in self.members.values():
            member.colocate(self.members)

    @property
    def actor(self) -> ActorWorker:
        member = self.members["actor"]
        assert isinstance(member, ActorWorker)
        return member

    @property
    def rollout(self) -> RolloutWorker:
        member = self.members["rollout"]
        assert isinstance(member, RolloutWorker)
        return member

    @property
    def reference(self) -> ActorWorker | ReferenceWorker:
        """The reference worker; with LoRA, the actor with its adapters disabled."""
        member = self.members.get("ref")
        return member if isinstance(member, ReferenceWorker) else self.actor

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        for member in (self.actor, self.rollout) if "actor" in self.members else ():
            member.init_model()
        if "ref" in self.members:
            self.reference.init_model()
        mesh = self.engine_mesh
        self.register_mesh(DATA_PARALLEL, mesh.data_parallel_rank, mesh.collects)

    @property
    def engine_mesh(self) -> Mesh:
        """The mesh of the engines in this process; all must have the same, as they get the same rows."""
        workers = [m for m in self.members.values() if isinstance(m, TrainWorker)]
        meshes = {worker.engine.mesh for worker in workers}
        if len(meshes) != 1:
            raise ValueError(
                f"actor and reference stand on different meshes ({meshes}); give both the same strategy, "
                "or workers of their own"
            )
        return meshes.pop()

    @register(
        dispatch_mode=replace(
            Dispatch.DP_COMPUTE_PROTO,
            dispatch_fn=split_numbered,
            collect_fn=join_slots,
            by_slot=False,
        )
    )
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generates one trajectory per row with the row's agent loop."""
        self._calls += 1
        rows = in_call(numbered(prompts), self._calls)
        rollout = self.config.actor_rollout_ref.rollout
        rows.meta_info = {"sampling_params": sampling_of(prompts.meta_info, rollout)}
        self.rollout.submit(rows)
        finished = self.rollout.finished(None, 0.0)
        if not self.rollout.leads:
            return DataProto()
        outputs = {
            row: output
            for group in finished.groups
            for row, output in zip(group.rows, group.outputs, strict=True)
        }
        if sum(len(group.outputs) for group in finished.groups) > len(rows):
            raise ValueError(
                "an agent loop returned several rows for a trajectory, and generate_sequences returns "
                "one row per prompt row; train with hone.trainer.main_ppo"
            )
        ordered = [outputs[row] for row in range(len(rows))]
        batch = collate_outputs(ordered, pad_token_id=self.actor.tokenizer.pad_token_id)
        if not rollout.calculate_log_probs:
            batch.batch.pop("rollout_log_probs", None)
        batch.meta_info["metrics"] = loop_metrics(ordered) | finished.metrics
        batch.meta_info["temperature"] = rollout.temperature
        return with_verl_columns(batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto, *, with_sum_pi_squared: bool = False) -> DataProto:
        return self.actor.compute_log_prob(
            data, with_sum_pi_squared=with_sum_pi_squared, temperature=_temperature(data)
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        return self.reference.compute_ref_log_prob(data, temperature=_temperature(data))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto, *, step_rows: int | None = None) -> DataProto:
        """Runs all updates of this step and then updates the rollout weights, as verl does."""
        temperature = _temperature(data)
        out = self.actor.update_actor(data, step_rows=step_rows, temperature=temperature)
        self.rollout.announce_weights(self.actor.version())
        return out

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        self.actor.load_checkpoint(folder)
        self.rollout.announce_weights(self.actor.version())

    save_checkpoint = _forwarded("actor", ActorWorker.save_checkpoint)
    version = _forwarded("actor", ActorWorker.version)
    submit = _forwarded("rollout", RolloutWorker.submit)
    finished = _forwarded("rollout", RolloutWorker.finished)
    abort = _forwarded("rollout", RolloutWorker.abort)
    weight_path = _forwarded("rollout", RolloutWorker.weight_path)
    announce_weights = _forwarded("rollout", RolloutWorker.announce_weights)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Stops the rollout engine, if there is one."""
        if "rollout" in self.members:
            self.rollout.close()


def _temperature(data: DataProto) -> float | None:
    """Returns the temperature that verl's loops pass in the batch."""
    return data.meta_info.get("temperature")
