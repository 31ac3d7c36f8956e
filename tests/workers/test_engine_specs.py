"""The EngineSpec of each role."""

from __future__ import annotations

from pathlib import Path

import torch

from hone.workers.actor import ActorWorker
from hone.workers.engine_specs import actor_spec, critic_spec, reference_spec
from tests.workers.tasks import RESPONSE, config_of

CPU = torch.device("cpu")
LORA = ("actor_rollout_ref.model.lora_rank=4", "critic.model.lora_rank=2")


def specs(*overrides):
    config = config_of(Path("folder"), *overrides)
    worker = ActorWorker(config)
    return [make(config, worker, CPU) for make in (actor_spec, reference_spec, critic_spec)]


def test_only_trained_roles_have_an_optimizer():
    actor, reference, critic = specs()
    assert actor.optim is not None
    assert critic.optim is not None
    assert reference.optim is None


def test_the_critic_starts_from_the_actors_model_under_a_value_head():
    actor, reference, critic = specs()
    assert {spec.model_path for spec in (actor, reference, critic)} == {"folder"}
    assert [spec.head for spec in (actor, reference, critic)] == ["policy", "policy", "value"]
    assert specs("critic.model.path=other")[2].model_path == "other"


def test_actor_and_critic_have_their_own_adapters_and_the_reference_none():
    ranks = [spec.adapters and spec.adapters.rank for spec in specs(*LORA)]
    assert ranks == [4, None, 2]


def test_auto_is_float32_on_a_cpu_and_the_width_is_the_longest_response():
    assert {spec.dtype for spec in specs()} == {torch.float32}
    assert {spec.response_width for spec in specs()} == {RESPONSE}
