"""`rollout.exact=true` through the loop: no gap between rollout and trainer, and who is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hone.config import ConfigError
from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
from hone.rollout.contract import RolloutError
from hone.verl.dialect import load_config

from ..runs import ALPHABET, REWARDS, Run, Task, task_row

EXACT = "actor_rollout_ref.rollout.exact=true"
GAP = "rollout_corr/log_prob_abs_diff_max"


def task_of(family: str, folder: Path) -> Task:
    tokenizer = character_tokenizer(ALPHABET)
    lm = tiny_lm(len(tokenizer), hidden=48, heads=6, mlp=90, family=family, seed=3)
    model = save_pretrained(lm, tokenizer, folder / "model")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(task_row(i, 7 * i)) + "\n" for i in range(12)))
    return Task(model, rows, rows, REWARDS)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_step_agrees_to_the_last_bit(family: str, tmp_path: Path) -> None:
    task, length = task_of(family, tmp_path), "data.max_response_length=30"
    for name, more in {
        "update": ("actor_rollout_ref.rollout.temperature=0.7",),  # the update's own log-probs
        "pass": ("actor_rollout_ref.actor.ppo_mini_batch_size=2",),  # those of a pass before it
        "rows": ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",),
    }.items():
        run = Run(tmp_path / name).train(task.overrides(tmp_path / name, EXACT, length, *more))
        assert run.series(GAP) == [0.0, 0.0], name
        assert run.series("rollout_corr/kl") == [0.0, 0.0]
        assert all(norm > 0 for norm in run.series("actor/grad_norm"))


def test_without_it_there_is_a_gap(train: Callable[..., Run]) -> None:
    """Else the test above would show nothing."""
    assert max(train("data.max_response_length=30").series(GAP)) > 0


def test_turns_agree_too(train: Callable[..., Run]) -> None:
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop=trainer.ppo.loops:TwoTurns"
    assert train(EXACT, loop).series(GAP) == [0.0, 0.0]


def test_another_family_is_refused_before_its_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of("qwen3", tmp_path)
    monkeypatch.setattr("hone.engine.build.load_causal_lm", None)  # never reached
    with pytest.raises(RolloutError, match=r"families llama and qwen2, but .*model is qwen3"):
        Run(tmp_path / "run").train(task.overrides(tmp_path / "run", EXACT))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("trainer.n_gpus_per_node=2", "is for one rank"),
        ("actor_rollout_ref.model.lora_rank=4", "does not support adapters"),
        ("actor_rollout_ref.rollout.name=hf", "needs the native engine"),
        ("actor_rollout_ref.actor.use_torch_compile=true", "has kernels of its own"),
    ],
)
def test_what_it_cannot_keep_is_refused(
    task: Task, tmp_path: Path, more: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(task.overrides(tmp_path, EXACT, more, "data.train_batch_size=4"))
