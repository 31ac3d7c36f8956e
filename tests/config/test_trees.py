"""The trees beside `ppo_trainer`: supervised fine-tuning, generation, evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.config import ConfigError
from hone.verl.dialect import compose, load_config

SFT_CASES: list[tuple[list[str], str, list[str]]] = [
    (
        ["data.train_batch_size=10", "trainer.n_gpus_per_node=4"],
        "data.train_batch_size=10 is not divisible by 4 data-parallel ranks; use 8 or 12",
        ["data.train_batch_size=12"],
    ),
    (
        ["data.use_dynamic_bsz=false"],
        "data.use_dynamic_bsz=false needs data.micro_batch_size_per_gpu, for example 4",
        ["data.micro_batch_size_per_gpu=4"],
    ),
    (
        ["trainer.resume_mode=resume_path"],
        "trainer.resume_mode=resume_path needs trainer.resume_from_path, a global_step_N folder",
        ["trainer.resume_from_path=x"],
    ),
    (
        ["trainer.logger=tensorbord"],
        "trainer.logger=tensorbord is unknown. Did you mean 'tensorboard'? Use console, jsonl, "
        "file, tensorboard, wandb, mlflow, swanlab, or your own as pkg.mod:object",
        ["trainer.logger=tensorboard"],
    ),
    (["optim.lr=-1"], "optim.lr=-1 is out of range; use 0 or more (command line)", ["optim.lr=0"]),
]


@pytest.mark.parametrize(("overrides", "sentence", "repair"), SFT_CASES)
def test_a_supervised_run_that_cannot_start_is_refused(
    overrides: list[str], sentence: str, repair: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, config_name="sft_trainer")
    assert caught.value.problems == [sentence]
    load_config([*overrides, *repair], config_name="sft_trainer")


def test_the_budget_of_a_supervised_run_follows_its_longest_row() -> None:
    composed = compose(["data.max_length=10000"], config_name="sft_trainer")
    assert composed.config.data.max_token_len_per_gpu == 10000
    assert composed.notes == ()
    small = ["data.max_length=100", "data.max_token_len_per_gpu=64"]
    composed = compose(small, config_name="sft_trainer")
    assert composed.config.data.max_token_len_per_gpu == 100
    assert "its part of the longest sequence, so it is 100" in composed.notes[0]
    split = [*small, "ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=2"]
    composed = compose([*split, "data.train_batch_size=8"], config_name="rm_trainer")
    assert composed.config.data.max_token_len_per_gpu == 100
    assert "its part of the longest pair, so it is 100" in composed.notes[0]


def test_a_supervised_run_notes_that_fsdp2_replaces_megatron() -> None:
    composed = compose(["engine.strategy=megatron"], config_name="sft_trainer")
    assert composed.notes == ("engine.strategy=megatron: models are sharded with FSDP2",)
    assert composed.config.engine.strategy == "fsdp2"


def test_supervised_micro_batches_follow_tokens_unless_a_size_is_given() -> None:
    assert load_config(config_name="sft_trainer").data.sequences_per_micro_batch(2) is None
    fixed = ["data.use_dynamic_bsz=false", "data.micro_batch_size=8"]
    assert load_config(fixed, config_name="sft_trainer").data.sequences_per_micro_batch(2) == 4


def test_the_supervised_tree_has_its_own_optimizer_defaults() -> None:
    config = load_config(config_name="sft_trainer")
    assert (config.optim.lr, config.optim.betas, config.optim.lr_scheduler_type) == (
        1e-5,
        (0.9, 0.95),
        "cosine",
    )
    assert config.world_size == 1


@pytest.mark.parametrize(
    ("overrides", "sentence", "repair"),
    [
        (
            ["rollout.temperature=0"],
            "data.n_samples=5 greedy responses are all the same; "
            "use rollout.do_sample=true, or data.n_samples=1",
            ["data.n_samples=1"],
        ),
        (
            ["rollout.do_sample=false"],
            "data.n_samples=5 greedy responses are all the same; "
            "use rollout.do_sample=true, or data.n_samples=1",
            ["data.n_samples=1"],
        ),
        (
            ["data.n_samples=0"],
            "data.n_samples=0 is out of range; use 1 or more (command line)",
            ["data.n_samples=1"],
        ),
        (
            ["rollout.n=2"],
            "rollout.n=2 is refused: use data.n_samples for more responses per prompt (command line)",
            ["rollout.n=1"],
        ),
    ],
)
def test_a_generation_run_that_cannot_start_is_refused(
    overrides: list[str], sentence: str, repair: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, config_name="generation")
    assert caught.value.problems == [sentence]
    load_config([*overrides, *repair], config_name="generation")


def test_verls_generation_file_needs_only_another_engine() -> None:
    written = {
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 8,
        "trainer.device": "cuda",
        "data.path": "test.parquet",
        "data.prompt_key": "prompt",
        "data.n_samples": 5,
        "data.output_path": "out.parquet",
        "data.batch_size": 128,
        "model.path": "m",
        "model.external_lib": "null",
        "rollout.mode": "sync",
        "rollout.temperature": 1.0,
        "rollout.top_k": 50,
        "rollout.top_p": 0.7,
        "rollout.prompt_length": 1536,
        "rollout.response_length": 512,
        "rollout.dtype": "bfloat16",
        "rollout.gpu_memory_utilization": 0.5,
        "rollout.ignore_eos": "False",
        "rollout.enforce_eager": "True",
        "rollout.free_cache_engine": "True",
        "rollout.load_format": "dummy_dtensor",
        "rollout.tensor_model_parallel_size": 1,
        "rollout.data_parallel_size": 1,
        "rollout.max_num_batched_tokens": 8192,
        "rollout.max_model_len": "null",
        "rollout.max_num_seqs": 1024,
        "rollout.log_prob_micro_batch_size": "null",
        "rollout.log_prob_micro_batch_size_per_gpu": 8,
        "rollout.do_sample": "True",
        "rollout.disable_log_stats": "True",
        "rollout.enable_chunked_prefill": "True",
        "rollout.n": 1,
        "rollout.calculate_log_probs": "False",
        "actor.strategy": "fsdp",
        "actor.ulysses_sequence_parallel_size": 1,
        "actor.entropy_from_logits_with_chunking": "False",
        "actor.entropy_checkpointing": "False",
        "actor.fsdp_config.fsdp_size": -1,
        "actor.fsdp_config.forward_prefetch": "False",
        "ray_init.num_cpus": "null",
        "ray_init.timeline_json_file": "null",
    }
    overrides = [f"{key}={value}" for key, value in written.items()]
    config = load_config(overrides, config_name="generation")
    assert config.rollout.max_total_tokens == 2048
    assert config.world_size == 8
    assert load_config([*overrides, "rollout.name=vllm"], config_name="generation") == config


def test_verls_evaluation_file_loads() -> None:
    config = load_config(
        [
            "data.path=out.parquet",
            "data.prompt_key=prompt",
            "data.response_key=responses",
            "data.data_source_key=data_source",
            "data.reward_model_key=reward_model",
            "custom_reward_function.path=null",
            "custom_reward_function.name=compute_score",
            "ray_init.num_cpus=null",
        ],
        config_name="evaluation",
    )
    assert config.data.path == ("out.parquet",)


def test_an_evaluation_outside_its_ranges_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"metrics\.confidence=2 is out of range"):
        load_config(["metrics.confidence=2"], config_name="evaluation")


def test_a_key_of_another_tree_is_unknown_here() -> None:
    with pytest.raises(ConfigError, match="the config has no key 'algorithm'"):
        load_config(["algorithm.gamma=1"], config_name="generation")


@pytest.mark.parametrize("name", ["sft_trainer", "evaluation", "mine"])
def test_a_program_refuses_a_config_of_another_tree(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [sft_trainer, _self_]\n")
    with pytest.raises(
        ConfigError, match=f"config '{name}' is for .*this program reads ppo_trainer"
    ):
        compose(config_name=name, config_path=tmp_path, schema="ppo_trainer")


def test_the_name_of_a_users_file_does_not_decide_its_tree(tmp_path: Path) -> None:
    (tmp_path / "ppo.yaml").write_text("data: {max_length: 4}\n")
    config = compose(config_name="ppo", config_path=tmp_path, schema="sft_trainer").config
    assert config.data.max_length == 4
