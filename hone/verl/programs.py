"""Tables of verl's programs, and of unsupported programs and names with their error messages.

Nothing is imported here; finder.py resolves the paths.
"""

from __future__ import annotations

_SFT_PROGRAM, _PPO_PROGRAM = "hone.trainer.main_sft", "hone.trainer.main_ppo"
_DAPO_PROGRAM = f"{_PPO_PROGRAM} --config-name=dapo_trainer"
_SEARCH_DATA_SOURCES = (
    "nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle",
)  # fmt: skip
PROGRAMS: dict[str, str] = {
    "hone.trainer.fsdp_sft_trainer": _SFT_PROGRAM,
    "hone.trainer.sft_trainer": _SFT_PROGRAM,
    "hone.trainer.sft_trainer_ray": _SFT_PROGRAM,
    "hone.trainer.main_ppo_format": (
        f"{_PPO_PROGRAM} reward_model.scores={{"
        + ",".join(
            f"{name}:'hone.rewards.scores.qa_em_format:score_details'"
            for name in _SEARCH_DATA_SOURCES
        )
        + "} hone.tree=search_r1"
    ),
    "hone.search_r1.search.retrieval_server": "hone.retrieval.serve",
    "hone.model_merger.__main__": "hone.verl.model_merger",
    "hone.trainer.main_generation_server": "hone.verl.main_generation_server",
    "hone.recipe.dapo.main_dapo": _DAPO_PROGRAM,
    "hone.recipe.dapo.src.main_dapo": _DAPO_PROGRAM,
    "hone.recipe.entropy.main_entropy": _DAPO_PROGRAM,
    "hone.recipe.prime.main_prime": f"{_PPO_PROGRAM} --config-name=prime_trainer",
    "hone.recipe.transfer_queue.main_ppo": _PPO_PROGRAM,
    "hone.recipe.r1_ascend.main_ppo": _PPO_PROGRAM,
    "hone.recipe.r1.main_eval": "hone.trainer.main_eval",
}
"""Maps each program of verl (`python -m`) to hone's module and the arguments that precede the user's."""

_ASYNC_MESSAGE = "asynchronous training is not supported; hone.trainer.main_ppo takes the same keys"
_OWN_TRAINER_MESSAGE = (
    "this recipe has its own trainer, which is not supported; `hone recipes` lists the recipes, and "
    "docs/extend.md shows how to add a loss, an estimator or a loop"
)
ABSENT_PROGRAMS: dict[str, str] = {
    **{
        f"hone.{parent}.{program}": _ASYNC_MESSAGE
        for parent in ("experimental", "recipe")
        for program in ("fully_async_policy.fully_async_main", "one_step_off_policy.main_ppo")
    },
    "hone.recipe.one_step_off_policy.async_main_ppo": _ASYNC_MESSAGE,
    "hone.recipe.async_flow.main_ppo": _ASYNC_MESSAGE,
    "hone.recipe.partial_rollout.main_ppo": _ASYNC_MESSAGE,
    **{
        f"hone.recipe.{name}.main_{name}": _OWN_TRAINER_MESSAGE
        for name in ("disco", "flowrl", "gkd", "rep_exp", "sdpo", "spin", "spo", "sppo")
    },
    "hone.experimental.vla.main_ppo": _OWN_TRAINER_MESSAGE,
    "hone.recipe.spo.spo_main_ppo": _OWN_TRAINER_MESSAGE,
    "hone.recipe.asft.fsdp_sft_trainer_asft": _OWN_TRAINER_MESSAGE,
    "hone.recipe.async_reward_agent.main_ppo": _OWN_TRAINER_MESSAGE,
}
"""Maps each unsupported program of verl to its error message."""

_AGENT_LOOP_MESSAGE = (
    "agent loops run in the rollout worker; register yours, and hone.trainer.main_ppo runs it"
)
_REWARD_LOOP_MESSAGE = (
    "there is no separate scoring actor; hone.trainer.ppo.reward.load_reward_manager scores"
)
_MEDIA_MESSAGE = "images and videos are not supported; use text only"
_MEGATRON_MESSAGE = "strategy=megatron builds the model in hone.engine.megatron"
_SERVER_MESSAGE = "rollout servers are not supported; hone.LLM(path).generate(prompts) generates"
_CHECKPOINT_MESSAGE = (
    "checkpoints are written by the trainer; trainer.save_freq and hone export make them"
)


def _unsupported(message: str, names: str) -> dict[str, str]:
    """Maps each of the space-separated names to the message."""
    return dict.fromkeys(names.split(), message)


_LOOP_ACTORS = _unsupported(
    _AGENT_LOOP_MESSAGE, "AgentLoopManager AgentLoopWorker _InternalAgentLoopOutput"
)
_REWARD_ACTORS = {
    **_unsupported(_REWARD_LOOP_MESSAGE, "RewardLoopManager RewardLoopWorker"),
    "RewardModelManager": "reward models run in workers (reward_model.enable), not in servers",
}
_RM_DATASET = {"RMDataset": "`hone train-rm` reads pairs of responses and trains a reward model"}
_SKIP_MESSAGE = "generations are not reused; trainer.rollout_data_dir keeps them"
_SHARD_MESSAGE = "the engine wraps, loads, saves and moves its own shards (hone.engine)"
_FLOPS_MESSAGE = (
    "counting FLOPs is not supported; perf/mfu and perf/mbu report how much of the device is used"
)
ABSENT_NAMES: dict[str, dict[str, str]] = {
    "hone.experimental.agent_loop": _LOOP_ACTORS,
    "hone.experimental.agent_loop.agent_loop": _LOOP_ACTORS,
    "hone.experimental.agent_loop.utils": _unsupported(
        "tool responses are rendered with the model's own chat template",
        "build_gpt_oss_tool_response_text",
    ),
    "hone.experimental.reward_loop": _REWARD_ACTORS,
    "hone.experimental.reward_loop.reward_loop": _REWARD_ACTORS,
    "hone.experimental.reward_loop.reward_model": _REWARD_ACTORS,
    "hone.utils.dataset": _RM_DATASET,
    "hone.utils.dataset.rm_dataset": _RM_DATASET,
    "hone.utils.dataset.rl_dataset": _unsupported(_MEDIA_MESSAGE, "process_image process_video"),
    "hone.workers.rollout.async_server": _unsupported(_SERVER_MESSAGE, "AsyncServerBase"),
    "hone.utils.dataset.vision_utils": _unsupported(_MEDIA_MESSAGE, "process_image process_video"),
    "hone.utils.flops_counter": _unsupported(_FLOPS_MESSAGE, "FlopsCounter get_device_flops"),
    "hone.utils.checkpoint.checkpoint_manager": _unsupported(
        _CHECKPOINT_MESSAGE, "BaseCheckpointManager"
    ),
    "hone.utils.checkpoint.fsdp_checkpoint_manager": _unsupported(
        _CHECKPOINT_MESSAGE, "FSDPCheckpointManager"
    ),
    "hone.models.registry": _unsupported(
        "your own models are loaded with trust_remote_code or external_lib", "ModelRegistry"
    ),
    "hone.third_party.vllm": _unsupported(_SERVER_MESSAGE, "LLM"),
    "hone.trainer.fsdp_sft_trainer": _unsupported(
        "there is no trainer class; use hone.sft(model, data) or hone.trainer.main_sft",
        "FSDPSFTTrainer",
    ),
    "hone.utils.ulysses": _unsupported(
        "the engine splits packed rows itself (actor.ulysses_sequence_parallel_size), without a global "
        "group and without changes to the model's attention",
        "FSDPUlyssesShardingManager get_ulysses_sequence_parallel_group "
        "set_ulysses_sequence_parallel_group get_ulysses_sequence_parallel_world_size "
        "get_ulysses_sequence_parallel_rank gather_seq_scatter_heads gather_heads_scatter_seq "
        "ulysses_pad_and_slice_inputs gather_outputs_and_unpad",
    ),
    "hone.models.mcore": _unsupported(_MEGATRON_MESSAGE, "hf_to_mcore_config init_mcore_model"),
    "hone.utils.rollout_skip": _unsupported(
        _SKIP_MESSAGE, "RolloutSkip PostDumpAction read_dumped_data wrap_generate_sequences"
    ),
    "hone.utils.skip": _unsupported(_SKIP_MESSAGE, "RolloutSkip SkipManager"),
    "hone.utils.fsdp_utils": _unsupported(
        _SHARD_MESSAGE,
        "CPUOffloadPolicy FSDPModule MixedPrecisionPolicy apply_fsdp2 fsdp2_clip_grad_norm_ "
        "fsdp2_load_full_state_dict fsdp_version get_fsdp_full_state_dict get_fsdp_state_ctx "
        "get_fsdp_wrap_policy get_init_weight_context_manager init_fn load_fsdp_model_to_gpu "
        "load_fsdp_optimizer offload_fsdp_model_to_cpu offload_fsdp_optimizer",
    ),
    "hone.workers.engine_workers": _unsupported(
        _SHARD_MESSAGE, "TrainingWorker TrainingWorkerConfig"
    ),
    "hone.workers.rollout.llm_server": _unsupported(_SERVER_MESSAGE, "LLMServerManager"),
    "hone.workers.rollout.replica": _unsupported(
        _SERVER_MESSAGE, "RolloutMode RolloutReplica get_rollout_replica_class"
    ),
    "hone.tools.image_zoom_in_tool": _unsupported(_MEDIA_MESSAGE, "ImageZoomInTool"),
    "hone.tools.geo3k_tool": _unsupported(_MEDIA_MESSAGE, "Geo3kTool"),
}
"""Names that can be imported but not called: {path: {name: error message}}."""
