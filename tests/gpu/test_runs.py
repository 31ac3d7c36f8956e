"""Whole runs on one GPU: a critic and a reference beside the actor, adapters, turns, exact mode."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer.runs import ALPHABET, REWARDS, Run, Task, task_row

from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm

from .device import needs_gpu

pytestmark = needs_gpu
SHAPE: dict[str, Any] = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 256}


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def task(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Task:
    """A random policy of two layers and 24 rows to train on."""
    folder = tmp_path_factory.mktemp("task")
    tokenizer = character_tokenizer(ALPHABET)
    lm = tiny_lm(len(tokenizer), family=request.param, tie_embeddings=False, seed=3, **SHAPE)
    model = save_pretrained(lm, tokenizer, folder / "model")
    rows = folder / "train.jsonl"
    rows.write_text("".join(json.dumps(task_row(i, n)) + "\n" for i, n in enumerate(range(24))))
    return Task(model, rows, rows, REWARDS)


@pytest.fixture
def train(task: Task, tmp_path: Path) -> Callable[..., Run]:
    def go(*more: str, folder: str = "run") -> Run:
        fixed = ("trainer.device=cuda", "data.max_response_length=40")
        return Run(tmp_path / folder).train(task.overrides(tmp_path / folder, *fixed, *more))

    return go


GAP = "rollout_corr/log_prob_abs_diff_max"
EXACT = "actor_rollout_ref.rollout.exact=true"


def test_a_critic_and_a_reference_share_the_gpu_with_the_actor(train: Callable[..., Run]) -> None:
    run = train(
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "trainer.total_training_steps=3",
    )
    assert len(run.steps) == 3
    assert run.series("actor/kl_loss")[0] == pytest.approx(0, abs=1e-3)
    assert run.series("actor/kl_loss")[-1] != 0
    losses = run.series("critic/vf_loss")
    assert all(torch.isfinite(torch.tensor(losses)))
    assert max(run.series(GAP)) < 0.05


def test_adapters_are_rolled_out_and_trained(train: Callable[..., Run]) -> None:
    run = train(
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "trainer.total_training_steps=3",
    )
    assert run.series("actor/kl_loss")[-1] > 0  # the adapters moved away from the base
    assert max(run.series(GAP)) < 0.1


@pytest.mark.parametrize("temperature", ["1.0", "0.6"])
def test_exact_mode_has_no_gap_at_all(train: Callable[..., Run], temperature: str) -> None:
    temperature_setting = f"actor_rollout_ref.rollout.temperature={temperature}"
    one = train(EXACT, temperature_setting, "trainer.total_training_steps=3")
    assert one.series(GAP) == [0.0] * 3
    several = train(  # log-probs of a pass of their own
        EXACT,
        temperature_setting,
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        folder="several",
    )
    assert several.series(GAP) == [0.0] * 2
    assert several.series("training/old_log_probs_recomputed") == [1.0] * 2
    assert all(g > 0 for g in one.series("actor/grad_norm"))


def test_turns_of_a_loop_find_their_prefix_and_stay_exact(train: Callable[..., Run]) -> None:
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop=trainer.ppo.loops:TwoTurns"
    run = train(EXACT, loop)
    assert run.series(GAP) == [0.0] * 2
    assert run.series("num_turns/mean") == [4.0] * 2


def test_compiled_layers_train_like_plain_layers(train: Callable[..., Run]) -> None:
    plain = train()
    compiled = train("actor_rollout_ref.actor.use_torch_compile=true", folder="compiled")
    norm = "actor/grad_norm"
    assert plain.series(norm)[0] > 0
    assert compiled.series(norm)[0] == pytest.approx(plain.series(norm)[0], rel=0.1)
