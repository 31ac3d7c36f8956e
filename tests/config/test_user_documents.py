"""What users' documents write: whole commands and YAML pieces load."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hone.verl.dialect import compose, load_config

USER_DOCS = Path(__file__).resolve().parents[3] / "shared" / "user_docs"
ROOTS = "actor_rollout_ref|algorithm|critic|custom_reward_function|data|reward_model|tool_config_path|trainer"
TOKEN = re.compile(rf"(?<![\w./`])((?:{ROOTS})[\w.]*=(?:\"[^\"]*\"|'[^']*'|[^\s\\`]+))")
YAML_LINE = re.compile(rf"^((?:{ROOTS})\.[\w.]+): +('[^']*'|[^\s#]+)", re.M)

COMMANDS: dict[str, list[str]] = {
    "grpo": [
        "algorithm.adv_estimator=grpo",
        "algorithm.group_size=4",
        "data.train_files=['~/data/gsm8k/train.parquet']",
        "data.val_files=['~/data/gsm8k/test.parquet']",
        "actor_rollout_ref.model.path=~/models/Qwen2.5-7B-Instruct",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "trainer.total_epochs=3",
        'trainer.logger=["tensorboard"]',
    ],
    "ppo with critic": [
        "algorithm.adv_estimator=gae",
        "algorithm.gamma=1.0",
        "algorithm.lam=0.95",
        "critic.enable=true",
        "critic.optim.lr=1e-5",
        "data.train_files=['~/data/gsm8k/train.parquet']",
    ],
    "one small gpu": [
        "data.train_files=/home/me/train.parquet",
        "data.val_files=/home/me/test.parquet",
        "data.train_batch_size=16",
        "data.max_prompt_length=512",
        "data.max_response_length=256",
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
        "critic.model.path=Qwen/Qwen2.5-0.5B-Instruct",
        "critic.optim.lr=1e-5",
        "critic.ppo_micro_batch_size_per_gpu=4",
        "algorithm.kl_ctrl.kl_coef=0.001",
        "trainer.logger=console",
        "trainer.val_before_train=False",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.save_freq=10",
        "trainer.test_freq=10",
        "trainer.total_epochs=3",
    ],
    "code with a sandbox": [
        "algorithm.adv_estimator=grpo",
        "data.train_files=['~/data/code/train.parquet']",
        "reward_model.reward_manager=prime",
        "reward_model.sandbox_fusion.url=https://api.sandbox.com/run",
        "reward_model.sandbox_fusion.max_concurrent=128",
    ],
    "tinyzero": [
        "data.train_files=train.parquet",
        "data.val_files=test.parquet",
        "data.train_batch_size=256",
        "data.val_batch_size=1312",
        "data.max_prompt_length=256",
        "data.max_response_length=1024",
        "actor_rollout_ref.model.path=base",
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=128",
        "actor_rollout_ref.actor.ppo_micro_batch_size=8",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size=8",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
        "actor_rollout_ref.ref.log_prob_micro_batch_size=4",
        "critic.optim.lr=1e-5",
        "critic.model.path=base",
        "critic.ppo_micro_batch_size=8",
        "algorithm.kl_ctrl.kl_coef=0.001",
        "trainer.logger=['wandb']",
        "+trainer.val_before_train=False",
        "trainer.default_hdfs_dir=null",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.save_freq=100",
        "trainer.test_freq=100",
        "trainer.project_name=TinyZero",
        "trainer.experiment_name=countdown",
        "trainer.total_epochs=15",
    ],
    "search": [
        "data.train_data_num=null",
        "data.train_batch_size=512",
        "data.val_batch_size=256",
        "data.max_start_length=2048",
        "data.max_prompt_length=4096",
        "data.max_response_length=500",
        "data.max_obs_length=500",
        "data.shuffle_train_dataloader=True",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=256",
        "actor_rollout_ref.actor.fsdp_config.param_offload=true",
        "actor_rollout_ref.actor.fsdp_config.grad_offload=false",
        "actor_rollout_ref.actor.kl_loss_coef=0.001",
        "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
        "actor_rollout_ref.actor.state_masking=true",
        "actor_rollout_ref.rollout.n_agent=5",
        "actor_rollout_ref.rollout.temperature=1",
        "algorithm.no_think_rl=false",
        "+trainer.val_only=false",
        "trainer.total_training_steps=1005",
        "max_turns=4",
        "do_search=false",
    ],
    "pure": [
        "reward_model.enable=True",
        "reward_model.type=prm",
        "reward_model.model.path=prm",
        "reward_model.reward_manager=prime",
        "reward_model.credit_assignment=0.1",
        "reward_model.verifiable_reward_coef=1.0",
        "reward_model.modeling_reward_coef=0.5",
        "reward_model.repeatness_punishment=False",
        "reward_model.high_repeat_threshold=0.2",
        "reward_model.micro_batch_size_per_gpu=2",
        "reward_model.forward_max_token_len_per_gpu=24000",
        "algorithm.adv_estimator=rloo",
        "algorithm.adv_norm=True",
        "algorithm.kl_penalty=low_var_kl",
        "actor_rollout_ref.rollout.n=8",
        "data.train_batch_size=64",
        "curriculum_learning.enable=True",
        "curriculum_learning.fn_name=remove_extreme",
        "curriculum_learning.fn_params.lower_percentile_bound=25",
        "trainer.debug_mode=False",
    ],
    "dapo": [
        "algorithm.adv_estimator=grpo",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc",
        "algorithm.filter_groups.max_num_gen_batches=10",
        "data.gen_batch_size=1536",
        "data.train_batch_size=512",
        "actor_rollout_ref.rollout.n=16",
        "actor_rollout_ref.actor.clip_ratio_low=0.2",
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
        "reward_model.reward_manager=dapo",
        "reward_model.overlong_buffer.enable=True",
        "reward_model.overlong_buffer.len=128",
        "reward_model.overlong_buffer.penalty_factor=1.0",
    ],
}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_users_command_loads(name: str) -> None:
    load_config(COMMANDS[name])


def test_the_small_gpu_command_has_the_documented_values() -> None:
    composed = compose(COMMANDS["one small gpu"])
    config = composed.config
    assert config.actor_rollout_ref.actor.sequences_per_micro_batch(1, "ppo_") == 4
    assert any("kl_ctrl.kl_coef=" in note and "no effect" in note for note in composed.notes)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_another_engine_runs_with_ours(engine: str) -> None:
    config = load_config([*COMMANDS["grpo"], f"actor_rollout_ref.rollout.name={engine}"])
    assert config.actor_rollout_ref.rollout.name == "native"


def test_yaml_pieces_of_the_documents_load(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\n"
        "actor_rollout_ref.actor.optim.lr: 1e-6\n"
        "critic.optim.lr: 1e-5\n"
        "algorithm.kl_penalty: 0.001\n"
        "algorithm.group_size: 4\n"
        "data:\n"
        "  train_files: [a.parquet, b.parquet, c.parquet]\n"
        "  dataset_weights: [0.5, 0.3, 0.2]\n"
        "actor_rollout_ref:\n"
        "  actor:\n"
        "    lora: {enable: true, r: 16, lora_alpha: 32, target_modules: [q_proj, v_proj]}\n"
        "trainer.log_generation_samples: true\n"
        "trainer.logger: '[\"wandb\"]'\n"
        "trainer.run_name: exp1\n"
        "tool_config: {max_tool_calls: 5, timeout: 30}\n"
        "sampling_params: {max_tokens: 2048, timeout: 30}\n"
        "reward_model: {enable: true, model_path: Qwen/Reward, batch_size: 64}\n"
        "ray_init: {num_cpus: null, timeline_json_file: null}\n"
        "trainer:\n"
        "  profile_steps: null\n"
        "  device: cuda\n"
        "  controller_nsight_options: {trace: 'cuda,nvtx', cuda-memory-usage: 'true'}\n"
    )
    config: Any = load_config(config_name="mine", config_path=tmp_path)
    assert config.actor_rollout_ref.model.lora_alpha == 32
    assert config.trainer.logger == ("wandb",)
    assert config.data.dataset_weights == (0.5, 0.3, 0.2)
    assert config.reward_model.sequences_per_micro_batch(4) == 16


def commands_in_documents() -> list[list[str]]:
    commands = []
    for file in sorted(USER_DOCS.glob("*.txt")) if USER_DOCS.is_dir() else []:
        text = file.read_text(encoding="utf-8", errors="replace")
        for block in text.split("```")[1::2]:
            for command in block.split("main_ppo")[1:]:
                tokens = [t for t in TOKEN.findall(command) if "..." not in t]
                commands.append([re.sub(r"=([\"'])(.*)\1$", r"=\2", t) for t in tokens])
    return [command for command in commands if command]


@pytest.mark.skipif(not USER_DOCS.is_dir(), reason="the users' documents are not here")
def test_every_command_in_the_documents_loads_as_printed() -> None:
    commands = commands_in_documents()
    assert len(commands) >= 10
    for command in commands:
        load_config(command)


@pytest.mark.skipif(not USER_DOCS.is_dir(), reason="the users' documents are not here")
def test_every_dotted_yaml_line_in_the_documents_is_known(tmp_path: Path) -> None:
    lines = set()
    for file in USER_DOCS.glob("*.txt"):
        lines |= set(YAML_LINE.findall(file.read_text(encoding="utf-8", errors="replace")))
    assert len(lines) >= 10
    for number, (key, value) in enumerate(sorted(lines)):
        (tmp_path / f"piece{number}.yaml").write_text(f"{key}: {value}\n")
        load_config(config_name=f"piece{number}", config_path=tmp_path)
