"""Search-R1's commands as its scripts write them, and a retriever that dies in mid-run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
from hone.tracking import read_metrics
from hone.trainer.main_ppo import main, run
from hone.trainer.ppo.trainer import PPOTrainer
from hone.verl.dialect import load_config
from tests.retrieval.passages import Retriever

ACTIONS = [*(f"<search> Italy {n} </search>" for n in range(9)), "<answer> Rome </answer>"]
pytestmark = pytest.mark.slow

SIZES = [
    "data.train_batch_size=4",
    "data.max_prompt_length=400",
    "data.max_response_length=30",
    "data.max_start_length=64",
    "data.max_obs_length=80",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.n_gpus_per_node=1",
    "trainer.total_training_steps=2",
    "trainer.logger=['jsonl']",
    "trainer.device=cpu",
    "+trainer.val_before_train=false",
]
BOTH = """
data.train_data_num=null data.val_data_num=null data.val_batch_size=256
data.shuffle_train_dataloader=True actor_rollout_ref.model.enable_gradient_checkpointing=true
actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285 actor_rollout_ref.actor.ppo_micro_batch_size=4
actor_rollout_ref.actor.fsdp_config.param_offload=true actor_rollout_ref.actor.fsdp_config.grad_offload=true
actor_rollout_ref.actor.fsdp_config.optimizer_offload=true
actor_rollout_ref.rollout.log_prob_micro_batch_size=4 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.6
actor_rollout_ref.ref.log_prob_micro_batch_size=4 actor_rollout_ref.ref.fsdp_config.param_offload=True
actor_rollout_ref.rollout.temperature=1 actor_rollout_ref.actor.state_masking=true
algorithm.no_think_rl=false +trainer.val_only=false trainer.default_hdfs_dir=null trainer.nnodes=1
trainer.save_freq=100 trainer.test_freq=50 trainer.project_name=Search-R1 trainer.total_epochs=15
max_turns=2 retriever.topk=3
"""
GRPO = """
algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_kl_loss=true
actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.rollout.n_agent=5
"""
PPO = """
algorithm.adv_estimator=gae actor_rollout_ref.rollout.n_agent=1 critic.optim.lr=1e-5
critic.model.use_remove_padding=True critic.optim.lr_warmup_steps_ratio=0.015
critic.model.enable_gradient_checkpointing=true critic.ppo_micro_batch_size=4
critic.model.fsdp_config.param_offload=true critic.model.fsdp_config.grad_offload=true
critic.model.fsdp_config.optimizer_offload=true algorithm.kl_ctrl.kl_coef=0.001 trainer.critic_warmup=0
"""
FORMAT = """
reward_model.structure_format_score=0.2 reward_model.final_format_score=0.1
reward_model.retrieval_score=0
"""
SCRIPTS = {"train_ppo.sh": PPO, "train_grpo.sh": GRPO, "train_grpo_format.sh": GRPO + FORMAT}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy for which some tokens are whole actions, and its rows."""
    folder = tmp_path_factory.mktemp("task")
    tokenizer = character_tokenizer(words=ACTIONS)
    lm = tiny_lm(len(tokenizer), hidden=32, mlp=48, seed=3)
    save_pretrained(lm, tokenizer, folder / "model")
    row = {
        "data_source": "nq",
        "prompt": [{"role": "user", "content": "Capital of Italy?"}],
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Rome"]}},
    }
    (folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    return folder


def paths(task: Path, out: Path, url: str) -> list[str]:
    return [
        f"data.train_files={task}/rows.jsonl",
        f"data.val_files={task}/rows.jsonl",
        f"actor_rollout_ref.model.path={task}/model",
        f"critic.model.path={task}/model",
        f"retriever.url={url}",
        f"trainer.default_local_dir={out}",
    ]


def steps(out: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(out) if "training/global_step" in line]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_search_r1_trains_as_written(script: str, task: Path, tmp_path: Path) -> None:
    from hone.verl.programs import PROGRAMS

    words = [*shlex.split(BOTH), *shlex.split(SCRIPTS[script])]
    if "format" in script:
        program = PROGRAMS["hone.trainer.main_ppo_format"].split()
        assert program[0] == "hone.trainer.main_ppo"
        words = [*program[1:], *words]
    with Retriever(tmp_path) as retriever:
        out = tmp_path / "run"
        main([*words, *SIZES, *paths(task, out, retriever.url)])
        assert retriever.answered() > 0
    lines = steps(out)
    assert len(lines) == 2
    kl = "actor/reward_kl_penalty" if "ppo" in script else "actor/kl_loss"
    assert all(kl in line for line in lines)
    assert sum(line["env/number_of_valid_search"] for line in lines) > 0
    assert sum(line["env/retrieval_failures"] for line in lines) == 0


def test_training_outlives_its_retriever_and_uses_it_again(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service stops after the second step and is back, on the same port, after the fourth."""
    services = [Retriever(tmp_path).__enter__()]
    url = services[0].url
    port = int(url.split(":")[2].split("/")[0])
    plain = PPOTrainer.step

    def step(self: PPOTrainer) -> Any:
        if self.global_step == 2:
            services[0].__exit__()
        if self.global_step == 4:
            services.append(Retriever(tmp_path, port).__enter__())
        return plain(self)

    monkeypatch.setattr(PPOTrainer, "step", step)
    overrides = ["trainer.total_training_steps=6", "retriever.retries=1"]
    try:
        run(
            load_config(
                [*shlex.split(BOTH + GRPO), *SIZES, *paths(task, tmp_path / "run", url), *overrides]
            )
        )
    finally:
        services[-1].__exit__()
    failures = [line["env/retrieval_failures"] for line in steps(tmp_path / "run")]
    assert len(failures) == 6
    assert [failed > 0 for failed in failures] == [False, False, True, True, False, False]
