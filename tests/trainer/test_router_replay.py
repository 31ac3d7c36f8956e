"""A mixture of experts in a run: the experts of the rollout, or of the log-prob pass, in the update."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hone.config import ConfigError
from hone.models.families import UnsupportedModel
from hone.verl.dialect import load_config

from .runs import Run, make_mixture

R3 = (
    "actor_rollout_ref.actor.router_replay.mode=R3",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay=true",
)
R2 = ("actor_rollout_ref.actor.router_replay.mode=R2",)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return f"actor_rollout_ref.model.path={make_mixture(tmp_path / 'moe')}"


@pytest.mark.slow
def test_a_run_replays_the_experts_of_the_rollout_or_of_its_log_prob_pass(
    train: Callable[..., Run], model: str
) -> None:
    twice = (
        model,
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.use_kl_loss=true",
    )
    plain = train(*twice, folder="plain")
    rollout, passed = train(*twice, *R3, folder="R3"), train(*twice, *R2, folder="R2")
    for run in (rollout, passed):
        last = run.numbers[-1]
        # The second epoch's routers have moved, the first one's have not.
        assert 0.8 < last["actor/routing_agreement"] <= 1.0
        assert 1.0 <= last["moe/layer_0/max_load"] <= 4.0
        assert 0.0 < last["moe/layer_1/entropy"] <= 1.0
        assert last["training/rollout_probs_diff_max"] < 1e-4
    assert not any(name.startswith("moe/") or "routing" in name for name in plain.numbers[-1])
    first = (plain.numbers[0], rollout.numbers[0], passed.numbers[0])
    for name in ("actor/grad_norm", "reward/mean"):
        assert first[1][name] == pytest.approx(first[0][name], rel=0.2)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_two_ranks_replay_the_experts_that_each_has_recorded(
    train: Callable[..., Run], model: str
) -> None:
    shared = (
        model,
        *R3,
        "actor_rollout_ref.actor.optim.optimizer=SGD",
        "actor_rollout_ref.actor.optim.lr=0.1",
    )
    one = train(*shared, folder="one")
    two = train(*shared, "trainer.controller=ray", "trainer.n_gpus_per_node=2", folder="two")
    for first, second in zip(one.numbers, two.numbers, strict=True):
        for name in ("actor/grad_norm", "actor/routing_agreement", "moe/layer_0/max_load"):
            assert second[name] == pytest.approx(first[name], rel=1e-3), name


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (R3[:1], "set actor_rollout_ref.rollout.enable_rollout_routing_replay=true"),
        (R3[1:], "does not replay"),
        (
            (*R3, "actor_rollout_ref.rollout.exact=true"),
            "exact mode does not support models with experts",
        ),
        ((*R2, "actor_rollout_ref.actor.use_torch_compile=true"), "compiled blocks"),
        (
            (
                *R2,
                "actor_rollout_ref.actor.use_torch_compile=false",
                "actor_rollout_ref.actor.fsdp_config.use_torch_compile=true",
            ),
            "use actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused(words: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config(list(words))


def test_a_dense_model_is_refused_when_it_is_loaded(train: Callable[..., Run]) -> None:
    with pytest.raises(UnsupportedModel, match="has no experts"):
        train(*R2)
