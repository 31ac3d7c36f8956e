"""The trees of verl, TinyZero, Search-R1 and PURE as a user's file: every key known, no default refused.

The trees themselves are other projects' files: they are read where HONE_VERL_TREES names a folder with
unpacked packages or YAML files. The small files below hold their kinds of keys and values, and always run.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hone.config import ConfigError
from hone.config.apply import ComposedConfig, compose_settings
from hone.config.sources import read_config
from hone.config.trees import TREES
from hone.verl.dialect import VERL_KEYS

FOLDER = Path(os.environ.get("HONE_VERL_TREES", "/nowhere"))
NOT_BUILT = ("fully_async", "one_step_off", "transfer_queue")

OLD = """
data: {tokenizer: null, return_raw_chat: False, train_files: a.parquet, val_batch_size: 1312}
actor_rollout_ref:
  actor:
    strategy: fsdp
    ppo_micro_batch_size: 64
    state_masking: False
    optim: {lr: 1e-6, min_lr_ratio: null, warmup_style: constant, total_training_steps: -1}
    fsdp_config: {wrap_policy: {min_num_params: 0}, grad_offload: False, fsdp_size: -1}
    checkpoint: {contents: [model, optimizer]}
  ref: {ulysses_sequence_parallel_size: "${actor_rollout_ref.actor.ulysses_sequence_parallel_size}"}
  rollout:
    name: vllm
    dtype: bfloat16
    load_format: dummy_dtensor
    tensor_model_parallel_size: 2
    max_num_batched_tokens: null
    n_agent: 1
  model: {use_remove_padding: False}
critic:
  ppo_micro_batch_size: 64
  forward_micro_batch_size: ${critic.ppo_micro_batch_size}
  model: {path: m, tokenizer_path: "${actor_rollout_ref.model.path}"}
do_search: false
retriever: {url: "http://127.0.0.1:8000/retrieve", topk: 3}
reranker: {do_rerank: False, topk: 3}
algorithm: {no_think_rl: False, state_masking: {start_state_marker: <information>}}
trainer:
  default_hdfs_dir: ~/experiments/${trainer.experiment_name}
  n_gpus_per_node: 8
  test_freq: False
  log_val_generations: -1
  resume_from_path: False
"""
MEGATRON = """
actor_rollout_ref:
  actor:
    strategy: megatron
    megatron: {tensor_model_parallel_size: 4, sequence_parallel: True, seed: 1, param_offload: True}
    load_weight: True
    fsdp_config: {pad_to_length_bucket: 1024}
    optim: {optimizer: adam, lr_decay_style: constant, min_lr: 0.0, lr_decay_steps: null}
  ref:
    megatron:
      use_mbridge: "${oc.select:actor_rollout_ref.actor.megatron.use_mbridge,False}"
      param_offload: "${oc.select:actor_rollout_ref.actor.megatron.param_offload,False}"
      expert_tensor_parallel_size: None
  rollout: {layer_name_map: {qkv_layer_name: qkv}, name: "???"}
critic:
  strategy: megatron
  megatron: {seed: 1}
  nccl_timeout: 600
  model: {gradient_checkpointing_kwargs: {activations_checkpoint_method: null}}
"""
NEW = """
actor_rollout_ref:
  rollout:
    name: ???
    _target_: verl.workers.config.RolloutConfig
    mtp: "${oc.select:actor_rollout_ref.model.mtp,null}"
    profiler: {tool_config: "${oc.select:actor_rollout_ref.actor.profiler.tool_config,null}"}
reward_model:
  {enable: null, rollout: {name: null}, reward_loop_source: null, reward_manager: null, n_gpus_per_node: 0}
custom_reward_function: {path: null, name: null}
reward: {reward_model: {enable: False, rollout: {name: "???"}}, reward_manager: {name: naive}}
algorithm:
  rollout_correction: {rollout_rs_threshold_lower: null, use_policy_gradient: false}
trainer: {npu_profile: {options: {with_npu: True}}, device: cuda}
"""
SFT = """
model: {partial_pretrain: m, fsdp_config: {wrap_policy: {min_num_params: 0}}, strategy: fsdp2}
trainer:
  checkpoint:
    save_contents: [model, optimizer, extra]
    load_contents: ${trainer.checkpoint.save_contents}
  test_freq: after_each_epoch
  resume_path: null
ulysses_sequence_parallel_size: 1
use_remove_padding: False
"""
GENERATION = """
rollout: {name: vllm, mode: sync, micro_batch_size: 256, use_fire_sampling: False, n: 1}
actor: {strategy: fsdp, fsdp_config: {fsdp_size: -1}}
"""


def read(file: Path) -> ComposedConfig:
    named, settings = read_config(file.stem, [file.parent], [], VERL_KEYS)
    kinds = {"sft": "sft_trainer", "generation": "generation", "evaluation": "evaluation"}
    guess = next((tree for word, tree in kinds.items() if word in file.stem), "ppo_trainer")
    return compose_settings(TREES[named or guess], settings, dialect=VERL_KEYS)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ppo_old", OLD),
        ("ppo_megatron_like", MEGATRON),
        ("ppo_new", NEW),
        ("sft_old", SFT),
        ("generation_old", GENERATION),
    ],
)
def test_a_file_with_verls_keys_and_defaults_composes(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / f"{name}.yaml"
    file.write_text(text)
    composed = read(file)
    assert len(composed.notes) < 12  # one line per topic


def test_references_of_a_file_cross_renames_and_keys_without_a_field(tmp_path: Path) -> None:
    (tmp_path / "sft_old.yaml").write_text(SFT)
    config = read(tmp_path / "sft_old.yaml").config
    assert config.checkpoint.load_contents == ("model", "optimizer", "extra")
    assert config.trainer.test_freq == "after_each_epoch"
    (tmp_path / "mega.yaml").write_text(MEGATRON)
    policy = read(tmp_path / "mega.yaml").config.actor_rollout_ref
    assert policy.ref.fsdp_config.param_offload
    assert policy.rollout.name == "native"


def test_null_in_a_file_is_the_default_and_replaces_no_value(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "reward: {reward_model: {model_path: judge}}\n"
        "reward_model: {model: {path: null}, enable: null}\n"
    )
    model = read(tmp_path / "mine.yaml").config.reward_model
    assert model.model.path == "judge"
    assert model.enable is False


@pytest.mark.skipif(not FOLDER.is_dir(), reason="HONE_VERL_TREES names no folder")
def test_every_tree_of_the_packages_composes() -> None:
    files = [
        file
        for file in FOLDER.rglob("*.yaml")
        if ("trainer" in file.stem or file.stem in ("generation", "evaluation"))
        and file.parent.name in ("config", "tinyzero", "search_r1", "pure")
        and not file.stem.startswith(NOT_BUILT)
    ]
    assert files
    problems: list[str] = []
    for file in files:
        try:
            read(file)
        except ConfigError as error:
            problems += [f"{file}: {p}" for p in error.problems]
    assert problems == []
