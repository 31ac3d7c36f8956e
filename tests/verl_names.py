"""Names that verl's examples and documents import, by module: what "change the package name" must cover.

Collected from the imports of its example programs, data scripts and documents of January 2026.
"""

from __future__ import annotations

EXAMPLES_AND_DOCUMENTS = {
    "verl": "DataProto",
    "verl.protocol": "DataProto",
    "verl.experimental.agent_loop.agent_loop": "AgentLoopBase AgentLoopMetrics AgentLoopOutput register "
    "AgentLoopManager AgentLoopWorker AsyncLLMServerManager",
    "verl.experimental.agent_loop.tool_agent_loop": "AgentData AgentState ToolAgentLoop",
    "verl.experimental.agent_loop.utils": "build_gpt_oss_tool_response_text resolve_config_path",
    "verl.experimental.agent_loop.tool_parser": "FunctionCall HermesToolParser ToolParser",
    "verl.experimental.dataset.sampler": "AbstractSampler AbstractCurriculumSampler",
    "verl.experimental.reward_loop": "RewardLoopManager RewardLoopWorker RewardModelManager",
    "verl.experimental.reward_loop.reward_manager": "register",
    "verl.experimental.reward_loop.reward_manager.base": "RewardManagerBase",
    "verl.interactions.base": "BaseInteraction",
    "verl.interactions.gsm8k_interaction": "Gsm8kInteraction",
    "verl.interactions.weather_interaction": "WeatherInteraction",
    "verl.interactions.utils.interaction_registry": "initialize_interactions_from_config",
    "verl.single_controller": "ClassWithInitArgs ResourcePool Worker WorkerGroup",
    "verl.single_controller.base": "Worker",
    "verl.single_controller.base.decorator": "Dispatch Execute register",
    "verl.single_controller.ray": "RayClassWithInitArgs RayResourcePool RayWorkerGroup",
    "verl.single_controller.ray.base": "RayClassWithInitArgs RayResourcePool RayWorkerGroup "
    "create_colocated_worker_cls",
    "verl.single_controller.ray.megatron": "NVMegatronRayWorkerGroup",
    "verl.tools.base_tool": "BaseTool OpenAIFunctionToolSchema ToolResponse",
    "verl.tools.gsm8k_tool": "Gsm8kTool",
    "verl.tools.sandbox_fusion_tools": "SandboxFusionTool",
    "verl.tools.search_tool": "SearchTool",
    "verl.tools.schemas": "OpenAIFunctionToolSchema ToolResponse",
    "verl.tools.utils.tool_registry": "initialize_tools_from_config",
    "verl.trainer.config": "AlgoConfig RolloutCorrectionConfig",
    "verl.trainer.config.algorithm": "RolloutCorrectionConfig",
    "verl.trainer.main_ppo": "TaskRunner create_rl_dataset create_rl_sampler run_ppo",
    "verl.trainer.ppo.core_algos": "AdvantageEstimator agg_loss compute_grpo_outcome_advantage "
    "kl_penalty register_adv_est register_policy_loss",
    "verl.trainer.ppo.ray_trainer": "AdvantageEstimator RayPPOTrainer ResourcePoolManager Role "
    "apply_kl_penalty compute_advantage compute_data_metrics compute_timing_metrics marked_timer",
    "verl.trainer.ppo.reward": "compute_reward load_reward_manager",
    "verl.trainer.ppo.rollout_corr_helper": "compute_rollout_correction_and_rejection_mask "
    "compute_rollout_correction_weights compute_rollout_rejection_mask",
    "verl.utils": "hf_processor hf_tokenizer",
    "verl.utils.checkpoint.checkpoint_manager": "find_latest_ckpt_path",
    "verl.utils.dataset": "RLHFDataset RMDataset SFTDataset",
    "verl.utils.dataset.vision_utils": "process_image process_video",
    "verl.utils.dataset.rl_dataset": "RLHFDataset collate_fn get_dataset_class",
    "verl.utils.debug": "log_gpu_memory_usage marked_timer",
    "verl.utils.device": "get_device_name get_torch_device is_cuda_available",
    "verl.utils.flops_counter": "FlopsCounter",
    "verl.utils.fs": "copy_local_path_from_hdfs copy_to_local",
    "verl.utils.hdfs_io": "copy exists makedirs",
    "verl.utils.import_utils": "deprecated import_external_libs is_vllm_available load_extern_object "
    "load_extern_type load_module",
    "verl.utils.logger.aggregate_logger": "LocalLogger log_with_rank print_rank_0",
    "verl.utils.net_utils": "is_ipv4 is_ipv6",
    "verl.utils.metric": "reduce_metrics",
    "verl.utils.profiler": "DistProfiler DistProfilerExtension GPUMemoryLogger ProfilerConfig "
    "log_gpu_memory_usage marked_timer simple_timer",
    "verl.utils.py_functional": "append_to_dict timeout_limit union_two_dict",
    "verl.utils.reward_score": "default_compute_score gsm8k math math_dapo math_reward prime_code",
    "verl.utils.reward_score.gsm8k": "compute_score extract_solution",
    "verl.utils.reward_score.math": "last_boxed_only_string remove_boxed",
    "verl.utils.reward_score.math_reward": "compute_score last_boxed_only_string remove_boxed",
    "verl.utils.rollout_trace": "RolloutTraceConfig rollout_trace_attr rollout_trace_op",
    "verl.utils.seqlen_balancing": "get_seqlen_balanced_partitions log_seqlen_unbalance",
    "verl.utils.tokenizer": "hf_processor hf_tokenizer",
    "verl.utils.torch_functional": "logprobs_from_logits masked_mean",
    "verl.utils.tracking": "Tracking ValidationGenerationsLogger",
    "verl.workers.fsdp_workers": "ActorRolloutRefWorker CriticWorker RewardModelWorker",
    "verl.workers.megatron_workers": "ActorRolloutRefWorker CriticWorker RewardModelWorker",
    "verl.workers.reward_manager": "AbstractRewardManager register",
    "verl.workers.rollout.replica": "TokenOutput get_rollout_replica_class",
}
