"""Maps the names of verl's modules (`hone` replaces `verl`) to the objects that implement them.

modules.py has the paths that are one of our modules. Nothing is imported here; finder.py resolves the names.
"""

from __future__ import annotations

_CONTROLLER = "hone.controller"
_DISPATCH = f"{_CONTROLLER}.dispatch"
_MANAGERS = "hone.rewards.managers"
_REWARD_LOOP = f"{_MANAGERS}.reward_loop"
_ADVANTAGES = "hone.algorithms.advantages"
_LOSSES = "hone.algorithms.policy_losses"
_CORE_MODULE = "hone.verl.core_algos"
_TRAINER_FUNCTIONS = "hone.verl.ray_trainer"
_AGENTS = "hone.agents.contract"
_DATA = "hone.data"


def _map(module: str, names: str) -> dict[str, str]:
    """Maps each name to "module:name"."""
    return {name: f"{module}:{name}" for name in names.split()}


_MANAGER_NAMES = {
    **_map(f"{_MANAGERS}.rule", "AbstractRewardManager NaiveRewardManager"),
    **_map(f"{_MANAGERS}.batch", "BatchRewardManager"),
    **_map(f"{_MANAGERS}.prime", "PrimeRewardManager"),
    **_map(f"{_MANAGERS}.dapo", "DAPORewardManager"),
    **_map(f"{_MANAGERS}.registry", "register get_reward_manager_cls"),
    **_map("hone.verl.reward", "REWARD_MANAGER_REGISTRY"),
}
_LOOP_NAMES = {
    **_map(
        _AGENTS,
        "AgentLoopBase AgentLoopOutput AgentLoopMetrics DictConfigWrap SingleTurnAgentLoop ToolListWrap "
        "register register_agent_loop",
    ),
    "AsyncLLMServerManager": f"{_AGENTS}:ServerManager",
    "LLMServerClient": f"{_AGENTS}:ServerManager",
    **_map("hone.rollout.contract", "TokenOutput"),
    **_map("hone.verl.tool_agent_loop", "ToolAgentLoop"),
}
_PARSERS = "hone.agents.parsers"
_PARSER_NAMES = {
    **_map(f"{_PARSERS}.contract", "FunctionCall ToolParser"),
    **_map(f"{_PARSERS}.json_calls", "HermesToolParser KimiToolParser GptOssToolParser"),
    **_map(f"{_PARSERS}.tagged", "Qwen3XMLToolParser GLMToolParser"),
}
_FUNCTION_TOOLS = "hone.agents.tools.function_tool"
_FUNCTION_TOOL_NAMES = {
    **_map(
        _FUNCTION_TOOLS,
        "FUNCTION_TOOL_REGISTRY _LOADED_FUNCTION_TOOL_PATHS FunctionTool function_tool "
        "get_function_tool load_function_tools_from_path",
    ),
    **_map("hone.agents.tools.contract", "normalize_function_tool_return"),
}
_TOOL_LIST_NAMES = {
    **_map("hone.agents.tools.loading", "initialize_tools_from_config load_all_tools"),
    "get_tool_class": "hone.plugins:load_object",
}
_PROFILER_NAMES = _map(
    "hone.verl.profiler",
    "DistProfiler GPUMemoryLogger ProfilerConfig log_gpu_memory_usage mark_annotate mark_end_range "
    "mark_start_range marked_timer simple_timer",
) | {
    "_timer": "hone.verl.profiler:simple_timer",  # verl 0.4's name
    **_map(_TRAINER_FUNCTIONS, "DistProfilerExtension"),
    **_map("hone.verl.distributed", "reduce_timing"),
}
_LOGGERS = _map("hone.verl.profiler", "LocalLogger log_with_rank print_rank_0 print_with_rank")
_REWARD_LOOP_NAMES = {
    **_map(_REWARD_LOOP, "AsyncTokenBucket RewardManagerBase"),
    **_map("hone.verl.reward_loop", "get_reward_manager_cls"),
    "get_reward_loop_manager_cls": "hone.verl.reward_loop:get_reward_manager_cls",
    "RewardLoopManagerBase": f"{_REWARD_LOOP}:RewardManagerBase",
    **_map(_TRAINER_FUNCTIONS, "migrate_legacy_reward_impl"),
    "RawRewardFn": "hone.types:Function",
    **_map(f"{_MANAGERS}.registry", "register"),
    **{
        f"{kind}{ending}": f"{module}:{kind}RewardManager"
        for kind, module in (
            ("Naive", "hone.verl.reward_loop"),
            ("DAPO", "hone.verl.reward_loop"),
            ("RateLimited", _REWARD_LOOP),
        )
        for ending in ("RewardManager", "RewardLoopManager")
    },
}
_REWARD_LOOP_PATHS = (
    "hone.experimental.reward_loop",
    *(
        f"{path}{name}"
        for path in (
            "hone.experimental.reward_loop.reward_manager",
            "hone.experimental.reward.reward_loop",
        )
        for name in ("", ".base", ".naive", ".dapo", ".limited", ".registry")
    ),
)
_BASE_NAMES = _map(_CONTROLLER, "Worker WorkerGroup ResourcePool ClassWithInitArgs")
_RAY_NAMES = _map(
    _CONTROLLER,
    "RayResourcePool RayClassWithInitArgs RayWorkerGroup ResourcePoolManager FusedWorker "
    "create_colocated_worker_cls create_colocated_worker_cls_fused create_colocated_worker_raw_cls "
    "merge_resource_pool split_resource_pool Worker",
)
_DISPATCH_NAMES = {
    **_map(
        f"{_CONTROLLER}.decorator",
        "Dispatch Execute collect_nd_compute_dataproto make_nd_compute_dataproto_dispatch_fn register "
        "register_dispatch_mode update_dispatch_mode",
    ),
    **_map(_DISPATCH, "dispatch_nd_compute_dataproto"),
    "dispatch_one_to_all": f"{_DISPATCH}:broadcast",
    **dict.fromkeys(("dispatch_all_to_all", "dispatch_dp_compute"), f"{_DISPATCH}:scatter"),
    **dict.fromkeys(("collect_all_to_all", "collect_dp_compute"), f"{_DISPATCH}:as_list"),
    "dispatch_dp_compute_data_proto": f"{_CONTROLLER}.decorator:split_batches",
    "dispatch_dp_compute_data_proto_with_func": f"{_CONTROLLER}.decorator:split_after_func",
    "collect_dp_compute_data_proto": f"{_DISPATCH}:concat_batches",
}
_WORKER_NAMES = {
    "AsyncActorRolloutRefWorker": "hone.verl.actor_rollout_ref:ActorRolloutRefWorker",
    **_map("hone.verl.actor_rollout_ref", "ActorRolloutRefWorker"),
    **_map("hone.workers.critic", "CriticWorker"),
    **_map("hone.workers.reward_model", "RewardModelWorker"),
    **_map("hone.workers.process_reward_model", "ProcessRewardModelWorker"),
}
_CORE_ALGO_NAMES = {
    **_map(
        _CORE_MODULE,
        "ADV_ESTIMATOR_REGISTRY POLICY_LOSS_REGISTRY AdvantageEstimator "
        "compute_entropy_loss compute_gae_advantage_return compute_gdpo_outcome_advantage "
        "compute_gpg_outcome_advantage compute_grpo_outcome_advantage "
        "compute_grpo_passk_outcome_advantage compute_multi_turn_optimal_token_baseline_advantage "
        "compute_opo_outcome_advantage compute_optimal_token_baseline_advantage "
        "compute_pf_ppo_reweight_data compute_policy_loss compute_policy_loss_reinforce "
        "compute_reinforce_plus_plus_baseline_outcome_advantage "
        "compute_reinforce_plus_plus_outcome_advantage compute_remax_outcome_advantage "
        "compute_rewards compute_rloo_outcome_advantage",
    ),
    "compute_grpo_vectorized_outcome_advantage": f"{_CORE_MODULE}:compute_grpo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage": f"{_CORE_MODULE}:compute_rloo_outcome_advantage",
    **_map(_ADVANTAGES, "register_adv_est get_adv_estimator_fn"),
    **_map(_LOSSES, "register_policy_loss get_policy_loss_fn"),
    **{
        f"compute_policy_loss_{name}": f"{_LOSSES}.{file}:{name}"
        for file, names in {
            "covariance": "clip_cov kl_cov",
            "ratio": "gspo geo_mean dppo_tv dppo_kl gpg sapo cispo dro",
            "policy_loss": "vanilla",
            "bypass": "bypass_mode",
        }.items()
        for name in names.split()
    },
    **_map("hone.algorithms.policy_losses.policy_loss", "agg_loss"),
    **_map("hone.algorithms.value_loss", "compute_value_loss"),
    **_map(
        "hone.algorithms.kl",
        "kl_penalty kl_penalty_forward AdaptiveKLController FixedKLController get_kl_controller",
    ),
}
_ALGORITHM_CONFIGS = {
    "AlgoConfig": "hone.config.algorithm:AlgorithmConfig",
    **_map(
        "hone.config.algorithm",
        "FilterGroupsConfig KLControlConfig PFPPOConfig RolloutCorrectionConfig",
    ),
}
_ACTOR_CONFIGS = {
    "FSDPActorConfig": "hone.config.actor:ActorConfig",
    "McoreActorConfig": "hone.config.actor:ActorConfig",
    **_map("hone.config.actor", "ActorConfig PolicyLossConfig"),
}
_CRITIC_CONFIGS = {
    "FSDPCriticConfig": "hone.config.actor:CriticConfig",
    "McoreCriticConfig": "hone.config.actor:CriticConfig",
    "FSDPCriticModelCfg": "hone.config.actor:CriticModelConfig",
    **_map("hone.config.actor", "CriticConfig"),
}
_OPTIMIZER_CONFIGS = dict.fromkeys(
    ("OptimizerConfig", "FSDPOptimizerConfig", "McoreOptimizerConfig"),
    "hone.config.engine:OptimConfig",
)
_ENGINE_CONFIGS = {
    **dict.fromkeys(("EngineConfig", "FSDPEngineConfig"), "hone.config.engine:FSDPConfig"),
    "McoreEngineConfig": "hone.config.engine:MegatronConfig",
}
_MODEL_CONFIGS = {"HFModelConfig": "hone.config.model:ModelConfig"}
_ROLLOUT_CONFIGS = {
    "AgentLoopConfig": "hone.config.rollout:AgentConfig",
    **_map("hone.config.rollout", "CheckpointEngineConfig MultiTurnConfig RolloutConfig"),
}
_REWARD_CONFIGS = _map(
    "hone.config.reward", "RewardManagerConfig RewardModelConfig SandboxFusionConfig"
)
_METRICS = "hone.verl.metric_utils"
_ROLE_CHECKS = "WorkerType need_critic need_reference_policy need_reward_model need_teacher_policy"
_TOKENIZER_NAMES = _map(
    "hone.models.from_config", "hf_tokenizer hf_processor normalize_token_ids set_pad_token_id"
)
_TEMPLATE_NAMES = _map(
    f"{_DATA}.prompt_ids", "extract_system_prompt_and_generation initialize_system_prompt"
)
_DYNAMIC_DATASET_NAMES = _map(_DATA, "AbstractDataGenerator DynamicGenDataset")
_DATASET_NAMES = {
    "RLHFDataset": f"{_DATA}:RLHFDataset",
    "SFTDataset": f"{_DATA}:SFTDataset",
    "MultiTurnSFTDataset": f"{_DATA}:MultiTurnSFTDataset",
    "collate_fn": f"{_DATA}.reading:collate_tensors",
    "get_dataset_class": f"{_DATA}.create:dataset_class",
}

NAMES: dict[str, dict[str, str]] = {
    "hone.utils.reward_score": dict.fromkeys(
        ("default_compute_score", "_default_compute_score"), "hone.rewards:default_compute_score"
    ),
    "hone.workers.reward_manager": _MANAGER_NAMES,
    "hone.workers.reward_manager.registry": {
        name: _MANAGER_NAMES[name]
        for name in ("REWARD_MANAGER_REGISTRY", "register", "get_reward_manager_cls")
    },
    "hone.workers.fsdp_workers": _WORKER_NAMES,
    "hone.workers.megatron_workers": _WORKER_NAMES,
    "hone.workers.engine_workers": _WORKER_NAMES,
    "hone.workers.rollout.async_server": {"AsyncLLMServerManager": f"{_AGENTS}:ServerManager"},
    "hone.workers.rollout.llm_server": {"LLMServerClient": f"{_AGENTS}:ServerManager"},
    "hone.experimental.agent_loop": _LOOP_NAMES,
    "hone.experimental.agent_loop.agent_loop": _LOOP_NAMES,
    "hone.experimental.agent_loop.tool_agent_loop": {
        **_map("hone.verl.agent_state", "AgentData AgentState"),
        **_map("hone.verl.tool_agent_loop", "ToolAgentLoop"),
    },
    "hone.experimental.agent_loop.tool_parser": _PARSER_NAMES,
    "hone.experimental.agent_loop.utils": _map(f"{_DATA}.files", "resolve_config_path"),
    "hone.tools.function_tool": _FUNCTION_TOOL_NAMES,
    "hone.tools.sandbox_fusion_tools": _map(
        "hone.agents.tools.code_interpreter", "SandboxFusionTool"
    ),
    "hone.tools.mcp_search_tool": {"MCPSearchTool": "hone.agents.tools.mcp:MCPBaseTool"},
    "hone.tools.tool_registry": _TOOL_LIST_NAMES,
    "hone.tools.utils.tool_registry": _TOOL_LIST_NAMES,
    "hone.interactions.utils.interaction_registry": {
        **_map("hone.agents.tools.loading", "initialize_interactions_from_config"),
        "get_interaction_class": "hone.plugins:load_object",
    },
    "hone.base_config": {"BaseConfig": "hone.config.block:Block"},
    "hone.single_controller": _BASE_NAMES,
    "hone.single_controller.base": _BASE_NAMES,
    "hone.single_controller.base.decorator": _DISPATCH_NAMES,
    "hone.single_controller.base.worker_group": _BASE_NAMES,
    "hone.single_controller.ray": _RAY_NAMES,
    "hone.single_controller.base.megatron.worker": {"MegatronWorker": f"{_CONTROLLER}:Worker"},
    "hone.single_controller.ray.megatron": {
        "NVMegatronRayWorkerGroup": f"{_CONTROLLER}:RayWorkerGroup"
    },
    "hone.single_controller.ray.base": _RAY_NAMES,
    "hone.trainer.ppo.core_algos": _CORE_ALGO_NAMES,
    "hone.trainer.ppo.ray_trainer": {
        "RayPPOTrainer": "hone.trainer.ppo.trainer:PPOTrainer",
        **_map(_CONTROLLER, "RayResourcePool ResourcePoolManager Role"),
        **_map(_CORE_MODULE, "AdvantageEstimator"),
        **_map(
            _TRAINER_FUNCTIONS,
            f"apply_kl_penalty compute_advantage compute_response_mask {_ROLE_CHECKS}",
        ),
        **_map(
            _METRICS,
            "compute_data_metrics compute_throughout_metrics compute_timing_metrics "
            "compute_variance_proxy_metrics process_validation_metrics reduce_metrics",
        ),
        **_map("hone.verl.profiler", "marked_timer simple_timer"),
        "_timer": "hone.verl.profiler:simple_timer",
        **_map("hone.algorithms.policy_losses.policy_loss", "agg_loss"),
        **_map("hone.protocol", "DataProto"),
    },
    "hone.utils.metric": _map(_METRICS, "reduce_metrics AggregationType Metric"),
    "hone.trainer.config.algorithm": _ALGORITHM_CONFIGS,
    "hone.trainer.config.config": {
        "BaseModelConfig": "hone.config.model:ModelConfig",
        "MegatronCriticConfig": "hone.config.actor:CriticConfig",
        "ModuleConfig": "hone.config.data:CustomClassConfig",
        **_CRITIC_CONFIGS,
        **_map("hone.config.engine", "CheckpointConfig"),
    },
    "hone.workers.config": {
        **_ACTOR_CONFIGS,
        **_CRITIC_CONFIGS,
        **_OPTIMIZER_CONFIGS,
        **_ENGINE_CONFIGS,
        **_MODEL_CONFIGS,
        **_ROLLOUT_CONFIGS,
        **_REWARD_CONFIGS,
    },
    "hone.workers.config.actor": _ACTOR_CONFIGS,
    "hone.workers.config.critic": _CRITIC_CONFIGS,
    "hone.workers.config.optimizer": _OPTIMIZER_CONFIGS,
    "hone.workers.config.engine": _ENGINE_CONFIGS,
    "hone.workers.config.model": _MODEL_CONFIGS,
    "hone.workers.config.rollout": _ROLLOUT_CONFIGS,
    "hone.workers.config.reward": _REWARD_CONFIGS,
    "hone.trainer.ppo.utils": {
        "Role": f"{_CONTROLLER}:Role",
        **_map(_TRAINER_FUNCTIONS, f"create_rl_dataset create_rl_sampler {_ROLE_CHECKS}"),
    },
    "hone.trainer.constants_ppo": _map(_TRAINER_FUNCTIONS, "get_ppo_ray_runtime_env"),
    "hone.utils.ray_utils": {
        **_map(f"{_CONTROLLER}.ray", "parallel_put"),
        **_map("hone.event_loop", "get_event_loop"),
        **_map("hone.verl.py_functional", "auto_await"),
    },
    "hone.utils.dataset": _DATASET_NAMES,
    "hone.utils.dataset.rl_dataset": _DATASET_NAMES,
    "hone.utils.dataset.sft_dataset": {"SFTDataset": f"{_DATA}:SFTDataset"},
    "hone.utils.dataset.multiturn_sft_dataset": {
        "MultiTurnSFTDataset": f"{_DATA}:MultiTurnSFTDataset"
    },
    "hone.utils.dataset.dynamicgen_dataset": _DYNAMIC_DATASET_NAMES,
    "hone.experimental.dynamic_dataset.dynamicgen_dataset": _DYNAMIC_DATASET_NAMES,
    **dict.fromkeys(_REWARD_LOOP_PATHS, _REWARD_LOOP_NAMES),
    "hone.utils.profiler": _PROFILER_NAMES,
    "hone.utils.profiler.performance": _PROFILER_NAMES,
    "hone.utils.profiler.profile": _PROFILER_NAMES,
    "hone.utils.profiler.config": _PROFILER_NAMES,
    "hone.utils.debug": _PROFILER_NAMES,
    "hone.utils.debug.performance": _PROFILER_NAMES,
    "hone.utils.logger": _LOGGERS,
    "hone.utils.logger.aggregate_logger": _LOGGERS,
    "hone.utils.net_utils": _map("hone.verl.py_functional", "is_ipv4 is_ipv6"),
    "hone.utils.checkpoint.checkpoint_manager": {
        **_map("hone.tracking.run_folder", "find_latest_ckpt_path get_checkpoint_tracker_filename"),
        **_map("hone.verl.py_functional", "should_save_ckpt_esi"),
    },
    "hone.utils.chat_template": _TEMPLATE_NAMES,
    "hone.utils.import_utils": {
        **_map(
            "hone.plugins",
            "load_extern_object load_module import_external_libs",
        ),
        "load_extern_type": "hone.plugins:load_extern_object",
        **_map(
            "hone.verl.py_functional",
            "deprecated is_megatron_core_available is_nvtx_available is_sglang_available "
            "is_trl_available is_vllm_available load_class_from_fqn",
        ),
        **_map(f"{_DATA}.files", "resolve_config_path"),
    },
    "hone.utils.config": {
        **_map("hone.config.keys", "omega_conf_to_dataclass"),
        **_map(_TRAINER_FUNCTIONS, "validate_config"),
    },
    "hone.utils.tokenizer": _TOKENIZER_NAMES,
    "hone.utils.tokenizer.tokenizer": _TOKENIZER_NAMES,
    "hone.utils.tokenizer.chat_template": _TEMPLATE_NAMES,
    "hone.utils": {
        **_TOKENIZER_NAMES,
        **_map("hone.config.keys", "omega_conf_to_dataclass"),
        **_map("hone.verl.torch_functional", "as_torch_index group_mean_std"),
        **_map(_TRAINER_FUNCTIONS, "validate_config"),
    },
    "hone.workers.rollout.replica": {"TokenOutput": "hone.rollout.contract:TokenOutput"},
}
"""Maps each path whose names are in several of our modules to {name: "module:object"}."""
