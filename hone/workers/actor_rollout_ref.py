"""verl's worker of several roles: actor, rollout and reference behind one object, by verl's method names.

The loop of this package holds the roles apart; hand-written loops and verl's role mappings find this one.
"""

from __future__ import annotations

from dataclasses import replace

from hone.agents.collate import join_ranks, with_verl_columns
from hone.config import PPOTrainerConfig
from hone.controller import Dispatch, Worker, register
from hone.protocol import DataProto
from hone.workers.actor import ActorWorker, ReferenceWorker
from hone.workers.rollout_worker import RolloutWorker


class ActorRolloutRefWorker(Worker):
    """`role` is `actor_rollout`, `actor_rollout_ref` (keeps a reference too) or `ref`."""

    def __init__(self, config: PPOTrainerConfig, role: str = "actor_rollout_ref") -> None:
        super().__init__()
        lora = config.actor_rollout_ref.model.uses_lora and "actor" in role
        self.members: dict[str, Worker] = {}
        if "actor" in role:
            self.members["actor"] = ActorWorker(config)
            self.members["rollout"] = RolloutWorker(config)
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
        """With LoRA the actor itself, its adapters off."""
        member = self.members.get("ref")
        return member if isinstance(member, ReferenceWorker) else self.actor

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        for member in (self.actor, self.rollout) if "actor" in self.members else ():
            member.init_model()
        if "ref" in self.members:
            self.reference.init_model()

    @register(dispatch_mode=replace(Dispatch.DP_COMPUTE_PROTO, collect_fn=join_ranks))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        return with_verl_columns(self.rollout.generate_sequences(prompts))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        return self.actor.compute_log_prob(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        return self.reference.compute_ref_log_prob(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        """Every update of this step; the rollout has the new weights afterwards, as in verl."""
        out = self.actor.update_actor(data)
        self.rollout.announce_weights(self.actor.version())
        return out

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        self.actor.save_checkpoint(folder)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        self.actor.load_checkpoint(folder)
        self.rollout.announce_weights(self.actor.version())

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def version(self) -> int:
        return self.actor.version()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def weight_path(self) -> str:
        return self.rollout.weight_path()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def announce_weights(self, version: int) -> None:
        self.rollout.announce_weights(version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Stop the rollout engine, if there is one."""
        if "rollout" in self.members:
            self.rollout.close()
