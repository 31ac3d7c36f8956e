"""Nothing is accepted and ignored: every key stated to work is read by a program that runs.

Real tiny runs are watched (recorder.py); what this machine cannot run, such as a GPU engine or a second
rank, is shown in the source, place by place. A key that nobody reads fails here by its name.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import hone
from hone.config import config_to_dict
from hone.config.keys import leaves
from hone.config.trees import TREES
from hone.verl.dialect import load_config
from hone.verl.rules import matches_pattern

from .key_runs import RUNS, prepare
from .recorder import Recorder, recording

PACKAGE = Path(hone.__file__).parent
READ_ELSEWHERE: dict[str, tuple[str, str]] = {
    # several ranks
    "**.offload_policy": ("engine/sharding.py", "config.offload_policy"),
    "**.reshard_after_forward": ("engine/sharding.py", "config.reshard_after_forward"),
    "**.fsdp_size": ("engine/sharding.py", "config.fsdp_size"),
    "**.ulysses_sequence_parallel_size": (
        "config/engine.py",
        "sharding.ulysses_sequence_parallel_size",
    ),
    "**.megatron.expert_model_parallel_size": (
        "engine/megatron/mesh.py",
        "megatron.expert_model_parallel_size",
    ),
    "**.megatron.expert_tensor_parallel_size": (
        "config/engine.py",
        "self.expert_tensor_parallel_size",
    ),
    "**.megatron.sequence_parallel": ("engine/megatron/model.py", "megatron.sequence_parallel"),
    "**.megatron.override_transformer_config": (
        "engine/megatron/refusals.py",
        "megatron.override_transformer_config",
    ),
    # a GPU
    "**.gpu_memory_utilization": ("rollout/build.py", "config.gpu_memory_utilization"),
    "**.enforce_eager": ("rollout/build.py", "config.enforce_eager"),
    "**.cudagraph_capture_sizes": ("rollout/build.py", "config.cudagraph_capture_sizes"),
    "**.enable_prefix_caching": ("rollout/build.py", "config.enable_prefix_caching"),
    "global_profiler.nsys_options": ("trainer/main_ppo.py", "config.nsys_options"),
    "data.output_path": ("verl/main_generation_server.py", "data.output_path"),
    # a cluster
    "ray_kwargs.ray_init.*": ("trainer/ppo/roles.py", "config.ray_kwargs.ray_init"),
    "ray_kwargs.timeline_json_file": (
        "trainer/ppo/roles.py",
        "config.ray_kwargs.timeline_json_file",
    ),
    # a rollout pool of its own
    "actor_rollout_ref.rollout.n_gpus_per_node": (
        "config/trees.py",
        "policy.rollout.n_gpus_per_node",
    ),
    "**.checkpoint_engine.backend": ("trainer/ppo/publisher.py", "config.backend"),
    "**.checkpoint_engine.update_weights_bucket_megabytes": (
        "workers/train_worker.py",
        "config.rollout.checkpoint_engine.bucket_bytes",
    ),
    # a call of a tool
    "**.multi_turn.max_tool_response_length": (
        "agents/loops/tool.py",
        "limits.max_tool_response_length",
    ),
    "**.multi_turn.max_observation_tokens": (
        "agents/loops/tool.py",
        "limits.max_observation_tokens",
    ),
    # a retrieval service
    "retriever.*": ("agents/loops/search.py", "self.config.retriever"),
    "search.*": ("trainer/generation.py", "search.max_obs_length"),
    # a reward model's own pool
    "reward_model.n_gpus_per_node": ("config/trees.py", "model.n_gpus_per_node"),
    "reward_model.nnodes": ("config/trees.py", "model.nnodes"),
    # a served reward model
    "reward_model.server.*": ("rewards/loading.py", "reward_model.server"),
    "reward_model.judge.*": ("rewards/loading.py", "reward_model.judge"),
    # engines in other processes
    "**.rollout.vllm.python": ("rollout/vllm_build.py", "config.vllm.python"),
    "**.rollout.vllm.start_timeout_s": ("rollout/vllm_build.py", "config.vllm.start_timeout_s"),
    "**.rollout.vllm.stall_timeout_s": ("rollout/vllm_build.py", "config.vllm.stall_timeout_s"),
    "**.rollout.vllm.weights": ("rollout/vllm_build.py", "config.vllm.weights"),
    "**.engine_kwargs.vllm": ("rollout/vllm_build.py", "config.engine_kwargs.vllm"),
    "**.rollout.data_parallel_size": ("rollout/vllm_build.py", "config.data_parallel_size"),
    "**.tensor_model_parallel_size": (
        "rollout/vllm_build.py",
        "config.tensor_model_parallel_size",
    ),
    "**.pipeline_model_parallel_size": (
        "rollout/vllm_build.py",
        "config.pipeline_model_parallel_size",
    ),
    "**.rollout.server.*": ("rollout/server_build.py", "spec.config.server"),
    "**.rollout.sglang.python": ("rollout/sglang_process.py", "config.sglang.python"),
    "**.engine_kwargs.sglang": ("rollout/sglang_process.py", "config.engine_kwargs.sglang"),
    # labels of PRM800K
    "data.neutral_label": ("data/steps.py", "config.neutral_label"),
    # a run of many steps
    "trainer.alarms.deviations": ("trainer/ppo/alarms.py", "self.config.deviations"),
    # a code-running service
    "**.sandbox_fusion.max_concurrent": ("rewards/loading.py", "sandbox.max_concurrent"),
}
"""Key to the file and the expression that reads it."""


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    with recording() as watched:
        ground = prepare(tmp_path_factory.mktemp("keys"))
        for run in RUNS:
            run(ground)
    return watched


def read_keys(tree: str, recorder: Recorder) -> set[str]:
    """Keys read themselves, and keys whose value another read key takes over."""
    infos = leaves(TREES[tree].root).values()
    followed = {info.key: info.followed_key for info in infos}
    read = set(recorder.read[tree])
    while more := {followed[k] for k in read if followed.get(k)} - read - {None}:
        read |= {key for key in more if key is not None}
    return read


def elsewhere(key: str) -> str | None:
    return next((p for p in READ_ELSEWHERE if matches_pattern(p, key)), None)


@pytest.mark.slow
@pytest.mark.parametrize("tree", sorted(TREES))
def test_every_key_that_works_is_read(tree: str, recorder: Recorder) -> None:
    read = read_keys(tree, recorder)
    works = [info.key for info in leaves(TREES[tree].root).values()]
    assert [key for key in works if key not in read and not elsewhere(key)] == []


@pytest.mark.slow
@pytest.mark.parametrize("pattern", sorted(READ_ELSEWHERE))
def test_keys_of_programs_that_cannot_run_here_are_read_in_the_source(
    pattern: str, recorder: Recorder
) -> None:
    file, expression = READ_ELSEWHERE[pattern]
    source = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    read = {ast.unparse(n) for n in ast.walk(source) if isinstance(n, ast.Attribute)}
    assert expression in read
    keys = [
        info.key
        for name, tree in TREES.items()
        for info in leaves(tree.root).values()
        if info.key not in recorder.read[name]
    ]
    assert any(elsewhere(key) == pattern for key in keys), "this machine does read it: remove it"


def test_showing_copying_and_checking_do_not_count_as_reading() -> None:
    import copy
    import pickle

    with recording() as watched:
        config = load_config(["data.train_batch_size=4"])
        config_to_dict(config)
        copy.deepcopy(config)
        pickle.loads(pickle.dumps(config))
        assert repr(config)
    assert watched.read["ppo_trainer"] == {}


def test_reading_counts_directly_by_a_property_and_by_another_name() -> None:
    with recording() as watched:
        config: Any = load_config()
        _ = config.data.seed
        _ = config.actor_rollout_ref.actor.sequences_per_micro_batch(1, "ppo_")
        moved = config.critic.optim
        _ = moved.lr
    read = watched.read["ppo_trainer"]
    assert {"data.seed", "critic.optim.lr"} <= set(read)
    assert {
        "actor_rollout_ref.actor.use_dynamic_bsz",
        "actor_rollout_ref.actor.ppo_micro_batch_size",
    } <= set(read)
    assert "actor_rollout_ref.actor.optim.lr" not in read
    assert read["data.seed"].startswith(__file__)


def test_after_recording_the_classes_are_as_before() -> None:
    with recording():
        pass
    with recording() as watched:
        pass
    _ = load_config().data.seed
    assert watched.read["ppo_trainer"] == {}
