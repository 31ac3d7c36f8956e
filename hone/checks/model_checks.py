"""Checks that the engines of a run support its models and their parallel layouts; no weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hone.checks import Check, Facts, Problem, problems_of
from hone.config import PPOTrainerConfig
from hone.config.block import SchemaBlock
from hone.config.engine import FSDPConfig, MegatronConfig, sequence_parallel
from hone.engine.megatron import refusals
from hone.engine.optimizer import optimizer_class
from hone.models.facts import check_model, classifier_kind
from hone.models.paths import resolve_model_path
from hone.types import Settings

if TYPE_CHECKING:
    from hone.trainer.ppo.plan import Plan


def check_folders(facts: Facts) -> Iterator[Problem]:
    """Checks that the policy and the critic have a supported config and complete weights."""
    config, plan = facts.config, facts.plan
    paths = [config.actor_rollout_ref.model.path]
    if plan is not None and plan.needs_critic and config.critic.model.path:
        paths.append(config.critic.model.path)
    for path in dict.fromkeys(paths):
        yield from problems_of(partial(check_model, path))


def check_layouts(facts: Facts) -> Iterator[Problem]:
    """Checks that each training engine supports its model, parallel sizes and optimizer."""
    for layout in engine_layouts(facts.config, facts.plan):
        if layout.strategy in ("fsdp", "fsdp2"):
            yield from problems_of(layout.check_layout)
            yield from problems_of(layout.check_optimizer)
        elif layout.strategy == "megatron":
            arguments = layout.path, layout.override_config, _megatron(facts, layout)
            yield from problems_of(partial(refusals.check_role_supported, *arguments))


def megatron_notes(facts: Facts) -> list[str]:
    """Returns a note per override of a Megatron engine that has no effect."""
    layouts = engine_layouts(facts.config, facts.plan)
    blocks = [_megatron(facts, layout) for layout in layouts if layout.strategy == "megatron"]
    notes = (note for block in blocks for note in refusals.overrides_without_effect(block))
    return list(dict.fromkeys(notes))


def _megatron(facts: Facts, layout: EngineLayout) -> MegatronConfig:
    """Returns the Megatron settings of a role, which are the actor's if the role has none."""
    actor = facts.config.actor_rollout_ref.actor
    megatron: MegatronConfig = layout.role_config.get("megatron", actor.megatron)
    return megatron


def check_rollout_sharding(facts: Facts) -> Iterator[Problem]:
    """Checks that the native engine can shard the policy over the rollout ranks."""
    policy, ranks = facts.config.actor_rollout_ref, facts.config.rollout_ranks
    if policy.rollout.name == "native" and (size := policy.rollout.tensor_model_parallel_size) > 1:
        from hone.rollout.native.sharding import check_sharding

        yield from problems_of(partial(check_sharding, size, ranks, policy.model))


def check_reward_models(facts: Facts) -> Iterator[Problem]:
    """Checks that the reward models of this run have a supported config and complete weights."""
    plan = facts.plan
    if plan is None or not plan.reward_model or plan.has_reward_server:
        return
    reward_model = facts.config.reward_model.model
    ref_path = reward_model.ref_path if plan.reward_model == "prime" else None
    is_decoder = plan.reward_model in ("judge", "prime")
    for path in filter(None, (reward_model.path, ref_path)):
        yield from problems_of(partial(check_model, path, is_decoder=is_decoder))
        if plan.reward_model == "orm" and Path(resolve_model_path(path)).is_dir():
            trust = reward_model.trust_remote_code
            yield from problems_of(partial(classifier_kind, path, trust_remote_code=trust))


MODEL_CHECKS: tuple[Check, ...] = (
    check_folders,
    check_layouts,
    check_rollout_sharding,
    check_reward_models,
)


@dataclass(frozen=True)
class EngineLayout:
    """The model and the parallel layout of a training engine, for one role."""

    path: str
    override_config: Settings
    strategy: str
    role_config: SchemaBlock
    sharding: FSDPConfig
    ranks: int
    adapters: bool = False

    def check_layout(self) -> None:
        """Raises an error if the model or the ranks do not fit the parallel sizes."""
        sequence_size = sequence_parallel(self.role_config, self.sharding)
        tensor_size, shard_size = self.sharding.tensor_parallel_size, self.sharding.fsdp_size
        if sequence_size * tensor_size > 1:
            from hone.engine.mesh import check_layout

            sizes = {"sequence": sequence_size, "tensor": tensor_size, "shard_size": shard_size}
            check_layout(self.path, self.ranks, **sizes, adapters=self.adapters)

    def check_optimizer(self) -> None:
        """Raises an error if the optimizer is not known."""
        model_config = self.role_config.get("model", {})
        for block in (self.role_config, model_config):  # PRIME's `optim` is in `model`
            if (optim := block.get("optim")) is not None:  # the reference has no optimizer
                optimizer_class(optim)


def engine_layouts(config: PPOTrainerConfig, plan: Plan | None) -> Iterator[EngineLayout]:
    """Yields the layout of each training engine of the run; without a plan, only the actor's."""
    policy, critic, reward = config.actor_rollout_ref, config.critic, config.reward_model
    actor, ref = policy.actor, policy.ref
    ranks, uses_lora = config.world_size, policy.model.uses_lora
    path, override_config = policy.model.path, policy.model.override_config
    yield EngineLayout(
        path, override_config, actor.strategy, actor, actor.fsdp_config, ranks, uses_lora
    )
    if plan is None:
        return
    if plan.needs_reference and not uses_lora:
        yield EngineLayout(path, override_config, ref.strategy, ref, ref.fsdp_config, ranks)
    if plan.needs_critic:
        path, override_config = critic.model.path or path, critic.model.override_config
        sharding, uses_lora = critic.model.fsdp_config, critic.model.lora_rank > 0
        yield EngineLayout(
            path, override_config, critic.strategy, critic, sharding, ranks, uses_lora
        )
    if plan.has_reward_engine and reward.model.path:
        strategy = actor.strategy if plan.reward_model == "prime" else "fsdp2"
        ranks = sum(config.reward_pool) or ranks
        override_config, sharding = reward.model.override_config, reward.model.fsdp_config
        yield EngineLayout(reward.model.path, override_config, strategy, reward, sharding, ranks)
