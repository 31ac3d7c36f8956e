"""Models, layouts and settings that `strategy=megatron` refuses; importable without megatron-core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hone.config.engine import MegatronConfig
from hone.config.errors import ConfigError
from hone.models.families import UnsupportedModel, declared, key_shape
from hone.models.load import load_config
from hone.types import JsonValue

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
RESERVED = frozenset((
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "softmax_scale", "ffn_hidden_size", "normalization", "layernorm_epsilon", "gated_linear_unit",
    "activation_func", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "num_moe_experts",
    "mtp_num_layers", "multi_latent_attention", "hidden_dropout", "attention_dropout", "params_dtype",
    "pipeline_dtype", "bf16", "fp16", "fp8", "fp4", "enable_autocast", "autocast_dtype",
    "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "sequence_parallel", "pipeline_model_parallel_layout",
    "variable_seq_lengths", "moe_token_dispatcher_type", "deallocate_pipeline_outputs",
    "calculate_per_token_loss", "grad_scale_func", "finalize_model_grads_func", "no_sync_func",
    "use_cpu_initialization", "perform_initialization", "apply_rope_fusion",
))  # fmt: skip
"""Fields of megatron-core's TransformerConfig that come from the model, the layout and hone's loss; those
of experts (moe_*) too, but for `_FREE` and those that switch nothing on."""
_FREE = frozenset(("moe_router_dtype", "moe_permute_fusion", "moe_grouped_gemm"))


def refuse_role(
    path: str, override_config: Mapping[str, JsonValue], megatron: MegatronConfig
) -> None:
    """Raises for a model or settings of a role that cannot be built, before weights are loaded."""
    config = load_config(path)
    for name, value in override_config.items():
        setattr(config, name, value)
    refuse_overrides(megatron)
    refuse_model(config, path, megatron)


def refuse_overrides(megatron: MegatronConfig) -> None:
    """Raises for overrides of what the layers and the normalisation of the loss rest on."""
    settings = megatron.override_transformer_config
    if reserved := sorted(name for name, value in settings.items() if is_reserved(name, value)):
        raise ConfigError(
            [
                f"megatron.override_transformer_config has {', '.join(reserved)}, which hone sets from the "
                "model, the layout and the loss; remove it"
            ]
        )


def is_reserved(name: str, value: JsonValue) -> bool:
    """Whether an override changes what hone sets."""
    if name.startswith("moe_") and name not in RESERVED:
        return name not in _FREE and value not in (None, False, 0, "none")
    return name in RESERVED


def refuse_unknown(megatron: MegatronConfig) -> None:
    """Raises for overrides that are no fields of megatron-core's config."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = TransformerConfig.__dataclass_fields__
    if unknown := sorted(megatron.override_transformer_config.keys() - fields.keys()):
        raise ConfigError(
            [
                f"megatron.override_transformer_config has {', '.join(unknown)}, which megatron-core's "
                "TransformerConfig does not have"
            ]
        )


def refuse_model(hf: PreTrainedConfig, path: str, megatron: MegatronConfig) -> None:
    """Raises for a model that cannot be built, or not over so many ranks."""
    if hf.model_type not in FAMILIES:
        raise UnsupportedModel(
            f"{path} is a {hf.model_type}; strategy=megatron trains {', '.join(FAMILIES)}. Use "
            "strategy=fsdp2"
        )
    biased = hf.model_type != "qwen2" and declared(hf, "attention_bias")
    windows = declared(hf, "use_sliding_window")
    for feature, present in {
        "attention_bias (a bias of the output projection)": biased,
        "mlp_bias": declared(hf, "mlp_bias"),
        "use_sliding_window": windows,
        f"hidden_act={hf.hidden_act}": hf.hidden_act != "silu",
    }.items():
        if present:
            raise UnsupportedModel(
                f"{path} has {feature}, which strategy=megatron does not compute; use strategy=fsdp2"
            )
    kv_heads, _ = key_shape(hf)
    parts = [
        ("key-value heads", kv_heads, "tensor_model_parallel_size"),
        ("layers", hf.num_hidden_layers, "pipeline_model_parallel_size"),
    ]
    if hf.model_type == "qwen3_moe":
        parts.append(("experts", hf.num_experts, "expert_model_parallel_size"))
        _refuse_experts(hf, path, megatron)
    for what, count, key in parts:
        if count % megatron[key]:
            raise UnsupportedModel(
                f"{path} has {count} {what}, which megatron.{key}={megatron[key]} does not divide"
            )


def _refuse_experts(hf: PreTrainedConfig, path: str, megatron: MegatronConfig) -> None:
    ranks = megatron.expert_tensor_ranks
    if megatron.tensor_model_parallel_size > 1 and not megatron.sequence_parallel:
        raise UnsupportedModel(
            f"{path} has experts, which megatron.tensor_model_parallel_size="
            f"{megatron.tensor_model_parallel_size} trains with megatron.sequence_parallel=true only"
        )
    if hf.moe_intermediate_size % (8 * ranks):
        raise UnsupportedModel(
            f"{path} has experts of width {hf.moe_intermediate_size}, which {ranks} ranks of "
            "megatron.expert_tensor_parallel_size do not split into multiples of 8; use a smaller size"
        )
