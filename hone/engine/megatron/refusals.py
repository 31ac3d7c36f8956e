"""Refuses models, layouts and settings that `strategy=megatron` does not support.

These checks do not import megatron-core.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hone.config.engine import MegatronConfig
from hone.config.errors import ConfigError
from hone.models.families import MEGATRON_FAMILIES, UnsupportedModel, config_field, key_shape
from hone.models.load import load_config
from hone.types import JsonValue

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_STAGE_SIZE_FIELDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_RECOMPUTE_MODULES = ("core_attn", "mlp", "moe")
"""Supported names in `recompute_modules`; the others need Transformer Engine."""
PASSED_FIELDS = frozenset((
    *_STAGE_SIZE_FIELDS, "recompute_granularity", "recompute_method", "recompute_num_layers",
    "recompute_modules", "moe_router_dtype",
))  # fmt: skip
"""Fields of megatron-core's TransformerConfig that an override may set."""
FIXED_FIELDS: Mapping[str, JsonValue] = {
    "add_bias_linear": False, "apply_query_key_layer_scaling": False,
    "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0,
    "attention_output_gate": False, "attention_softmax_in_fp32": True, "calculate_per_token_loss": True,
    "context_parallel_size": 1, "deterministic_mode": False, "enable_autocast": False, "fp16": False,
    "fp32_residual_connection": False, "gated_linear_unit": True, "glu_linear_offset": 0.0,
    "hidden_dropout": 0.0, "layernorm_zero_centered_gamma": False, "moe_apply_probs_on_input": False,
    "moe_aux_loss_coeff": 0.0, "moe_enable_routing_replay": False,
    "moe_pad_expert_input_to_capacity": False, "moe_router_enable_expert_bias": False,
    "moe_router_force_load_balancing": False, "moe_router_load_balancing_type": "none",
    "moe_router_pre_softmax": True, "moe_router_score_function": "softmax",
    "moe_shared_expert_gate": False, "moe_token_dropping": False, "moe_z_loss_coeff": 0.0,
    "multi_latent_attention": False, "normalization": "RMSNorm", "qk_clip": False, "qk_l2_norm": False,
    "rotary_interleaved": False, "softmax_type": "vanilla", "test_mode": False,
}  # fmt: skip
"""Fields that an override may set only to this value, which the engine uses."""
IGNORED_FIELDS = frozenset((
    # kernels
    "apply_rope_fusion", "attention_backend", "bias_activation_fusion", "bias_dropout_fusion",
    "cross_entropy_fusion_impl", "cross_entropy_loss_fusion",
    "fused_single_qkv_rope", "gradient_accumulation_fusion", "masked_softmax_fusion",
    "memory_efficient_layer_norm", "moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion",
    "moe_use_legacy_grouped_gemm", "persist_layer_norm", "transformer_impl",
    "use_fused_weighted_squared_relu", "use_te_activation_func", "use_te_rng_tracker",
    # communication
    "async_tensor_model_parallel_allreduce", "batch_p2p_comm", "batch_p2p_sync", "cp_comm_type",
    "delay_wgrad_compute", "ep_overlap_early_attn_memory_release", "moe_deepep_num_sms",
    "moe_enable_deepep", "moe_extended_tp", "moe_flex_dispatcher_backend", "moe_hybridep_num_sms",
    "moe_shared_expert_overlap", "moe_token_dispatcher_type", "overlap_moe_expert_parallel_comm",
    "overlap_p2p_comm", "overlap_p2p_comm_warmup_flush", "pipeline_model_parallel_comm_backend",
    "symmetric_ar_type", "tp_comm_atomic_ag", "tp_comm_atomic_rs", "tp_comm_bootstrap_backend",
    "tp_comm_bulk_dgrad", "tp_comm_bulk_wgrad", "tp_comm_overlap", "tp_comm_overlap_ag",
    "tp_comm_overlap_disable_fc1", "tp_comm_overlap_disable_qkv", "tp_comm_overlap_rs",
    "tp_comm_overlap_rs_dgrad", "tp_comm_split_ag", "tp_comm_split_rs", "use_ring_exchange_p2p",
    "variable_seq_lengths",
    # schedule and memory
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "clone_scatter_output_in_embedding", "cpu_offloading", "cpu_offloading_activations",
    "cpu_offloading_double_buffering", "cpu_offloading_num_layers", "cpu_offloading_weights",
    "cuda_graph_impl", "cuda_graph_retain_backward_graph", "cuda_graph_scope",
    "cuda_graph_use_single_mempool", "cuda_graph_warmup_steps", "deallocate_pipeline_outputs",
    "defer_embedding_wgrad_compute", "disable_parameter_transpose_cache", "distribute_saved_activations",
    "enable_cuda_graph", "external_cuda_graph", "fine_grained_activation_offloading",
    "microbatch_group_size_per_vp_stage", "min_offloaded_tensor_size", "moe_layer_recompute",
    "num_microbatches_with_partial_activation_checkpoints", "offload_modules",
    "virtual_pipeline_model_parallel_size", "wgrad_deferral_limit",
    # initialization (weights are loaded) and logs
    "barrier_with_L1_time", "config_logger_dir", "init_method_std", "init_model_with_meta_device",
    "log_max_attention_logit", "moe_per_layer_logging", "perform_initialization",
    "use_cpu_initialization",
    # other devices, in verl's scripts
    "swap_optimizer", "use_flash_attn",
))  # fmt: skip
"""Fields that do not change results; the engine ignores them."""


def check_role_supported(
    path: str, override_config: Mapping[str, JsonValue], megatron: MegatronConfig
) -> None:
    """Raises, before weights are loaded, for a model or settings that the engine does not support."""
    config = load_config(path)
    for name, value in override_config.items():
        setattr(config, name, value)
    check_transformer_overrides(megatron)
    check_model_supported(config, path, megatron)


def check_transformer_overrides(megatron: MegatronConfig) -> None:
    """Raises for overrides that would change the model or its results."""
    overrides = _non_null_overrides(megatron)
    if refused_names := sorted(
        name for name, value in overrides.items() if not is_allowed(name, value)
    ):
        raise ConfigError(
            [
                f"megatron.override_transformer_config has {', '.join(refused_names)}, which hone sets "
                "from the model, the layout and the loss, or does not support; remove it"
            ]
        )


def is_allowed(name: str, value: JsonValue) -> bool:
    """Whether an override does not change results, or sets the dtype of the router."""
    if name == "moe_router_dtype":
        return value in ("fp32", "fp64")
    has_fixed_value = name in FIXED_FIELDS and value == FIXED_FIELDS[name]
    return name in PASSED_FIELDS or name in IGNORED_FIELDS or has_fixed_value


def _non_null_overrides(megatron: MegatronConfig) -> dict[str, JsonValue]:
    """Returns the overrides that are not null."""
    overrides = megatron.override_transformer_config
    return {name: value for name, value in overrides.items() if value is not None}


def passed_overrides(megatron: MegatronConfig) -> dict[str, JsonValue]:
    """Returns the overrides for megatron-core; without pipeline parallel, stage sizes are left out."""
    fields = PASSED_FIELDS
    if megatron.pipeline_model_parallel_size == 1:
        fields = fields - set(_STAGE_SIZE_FIELDS)
    overrides = {
        name: value for name, value in _non_null_overrides(megatron).items() if name in fields
    }
    if isinstance(modules := overrides.get("recompute_modules"), list | tuple):
        overrides["recompute_modules"] = [name for name in modules if name in _RECOMPUTE_MODULES]
    return overrides


def overrides_without_effect(megatron: MegatronConfig) -> list[str]:
    """Returns one note that names the ignored overrides, or an empty list."""
    overrides = _non_null_overrides(megatron)
    ignored_names = sorted(IGNORED_FIELDS & overrides.keys())
    if isinstance(modules := overrides.get("recompute_modules"), list | tuple):
        ignored_names += [
            f"{name} in recompute_modules" for name in modules if name not in _RECOMPUTE_MODULES
        ]
    if ignored_names:
        return [
            f"megatron.override_transformer_config has {', '.join(ignored_names)}, which has no effect here: "
            "hone has its own kernels, communication and schedule"
        ]
    return []


def check_model_supported(hf_config: PreTrainedConfig, path: str, megatron: MegatronConfig) -> None:
    """Raises if the engine does not support the model, or not with these parallel sizes."""
    if hf_config.model_type not in MEGATRON_FAMILIES:
        raise UnsupportedModel(
            f"{path} is a {hf_config.model_type} model; strategy=megatron trains "
            f"{', '.join(MEGATRON_FAMILIES)}. Use strategy=fsdp2"
        )
    has_bias = hf_config.model_type != "qwen2" and config_field(hf_config, "attention_bias")
    for feature, has_feature in {
        "attention_bias (a bias of the output projection)": has_bias,
        "mlp_bias": config_field(hf_config, "mlp_bias"),
        "use_sliding_window": config_field(hf_config, "use_sliding_window"),
        f"hidden_act={hf_config.hidden_act}": hf_config.hidden_act != "silu",
    }.items():
        if has_feature:
            raise UnsupportedModel(
                f"{path} has {feature}, which strategy=megatron does not support; use strategy=fsdp2"
            )
    kv_heads, _ = key_shape(hf_config)
    _check_stages(hf_config.num_hidden_layers, path, megatron)
    divisions = [("key-value heads", kv_heads, "tensor_model_parallel_size")]
    if hf_config.model_type == "qwen3_moe":
        divisions.append(("experts", hf_config.num_experts, "expert_model_parallel_size"))
        _check_experts(hf_config, path, megatron)
    else:
        width = hf_config.intermediate_size
        divisions.append(("MLP features", width, "tensor_model_parallel_size"))
    for dimension, count, key in divisions:
        if count % megatron[key]:
            raise UnsupportedModel(
                f"{path} has {count} {dimension}, which megatron.{key}={megatron[key]} does not divide"
            )


def _check_stages(layers: int, path: str, megatron: MegatronConfig) -> None:
    """Raises unless the stages without a configured size get equal numbers of layers."""
    stages, overrides = megatron.pipeline_model_parallel_size, passed_overrides(megatron)
    sizes: dict[str, int] = {}
    for name in _STAGE_SIZE_FIELDS:
        if isinstance(count := overrides.get(name), int):
            sizes[name] = count
    layers_left, stages_left = layers - sum(sizes.values()), stages - len(sizes)
    remainder = layers_left % stages_left if stages_left else layers_left
    if min(sizes.values(), default=1) < 1 or layers_left < stages_left or remainder:
        settings = "".join(f" with {name}={count}" for name, count in sizes.items())
        raise UnsupportedModel(
            f"{path} has {layers} layers, which megatron.pipeline_model_parallel_size={stages}{settings} "
            "does not divide"
        )


def _check_experts(hf_config: PreTrainedConfig, path: str, megatron: MegatronConfig) -> None:
    size = megatron.effective_expert_tensor_parallel_size
    if megatron.tensor_model_parallel_size > 1 and not megatron.sequence_parallel:
        raise UnsupportedModel(
            f"{path} has experts, which need megatron.sequence_parallel=true under "
            f"megatron.tensor_model_parallel_size={megatron.tensor_model_parallel_size}"
        )
    if hf_config.moe_intermediate_size % (8 * size):
        raise UnsupportedModel(
            f"{path} has experts of width {hf_config.moe_intermediate_size}, which "
            f"megatron.expert_tensor_parallel_size={size} does not split into multiples of 8; use a "
            "smaller size"
        )
