"""A tiny random model of every decoder family, with the layer kinds its large ones have.

Fields that most configs share are shrunk by name; what a family needs besides stands in `OVERRIDES`.
Sliding windows are shorter than the texts, every dropout is on (loading must switch it off), and biases,
norms and sinks are drawn at random: what a forward leaves out shows in the log-probs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

VOCABULARY = 96
POSITIONS = 128
WINDOW = 5

_SHRUNK: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "n_inner": 96,
    "max_position_embeddings": POSITIONS,
    "sliding_window": WINDOW,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rotary_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "query_pre_attn_scalar": 24,
    # Away from what changes nothing, where a family has them.
    "logits_scaling": 2.0,
    "logit_scale": 0.5,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
    "final_logit_softcapping": 3.0,
    "attn_logit_softcapping": 2.0,
    "routed_scaling_factor": 1.5,
    "dim_model_base": 32,
    "clip_qkv": 1.0,
}
_FLIPPED = """
    add_bias_linear attention_bias attention_out_bias bias do_layer_norm_before lm_head_bias mlp_bias
    multi_query new_decoder_architecture norm_topk_prob parallel_attn qk_layernorm
    reorder_and_upcast_attn scale_attn_by_inverse_layer_idx scale_attn_weights scale_embedding
    tie_word_embeddings use_bias use_parallel_residual use_qk_norm use_qkv_bias use_sliding_window
    """.split()  # noqa: SIM905
"""Switches that the second model of a family has the other way round."""
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


_LATENT = {"num_key_value_heads": 4}  # each head has its own keys, made from what all share
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
FLIPPED_OVERRIDES: dict[str, dict[str, Any]] = {
    "falcon": {"new_decoder_architecture": True, "parallel_attn": True, "num_kv_heads": 2},
    "helium": {"head_dim": 16},
    "phi3": {"rope_parameters": _PLAIN_ROPE | {"partial_rotary_factor": 0.5}},
}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "deepseek_v2": _LATENT | {"n_group": None, "topk_group": None},
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
    "minicpm3": _LATENT | {"dim_model_base": 32},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5},
    "cohere2_moe": {"logit_scale": 0.5},
    "youtu": _LATENT,
    "longcat_flash": _LATENT,
    "dots1": {"n_shared_experts": 1},
    "dbrx": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "diffllama": {"attention_dropout": 0.0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 5},
    "gemma3": {"vision_config": _SIGLIP, "mm_tokens_per_image": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(family: str, *, flipped: bool = False) -> Any:
    """A config of the family's own class, small; `flipped` has the other value of every switch."""
    from transformers import AutoConfig

    changed = OVERRIDES.get(family, {})
    if flipped:
        changed = changed | FLIPPED_OVERRIDES.get(family, {})
    return _shrunk(type(AutoConfig.for_model(family)), changed, flipped)


def _shrunk(kind: Any, changed: dict[str, Any], flipped: bool = False) -> Any:
    default = kind()
    names = {f.name: f.name for f in dataclasses.fields(kind)}
    names |= {general: own for general, own in (kind.attribute_map or {}).items() if own in names}
    settings: dict[str, Any] = {}
    for general, value in _SHRUNK.items():
        own = names.get(general)
        if own is None:
            continue
        present = getattr(default, own)
        if own == "sliding_window" and present is None:
            continue
        settings[own] = value
    for name in names.values():
        value = getattr(default, name, None)
        if ("drop" in name or "jitter" in name) and type(value) is float:
            settings[name] = 0.1
        if flipped and name in _FLIPPED and type(value) is bool:
            settings[name] = not value
        if flipped and name == "rope_parameters" and type(value) is dict and "rope_theta" in value:
            settings[name] = value | _YARN
        if type(value) is list and len(value) == getattr(default, "num_hidden_layers", -1):
            settings[name] = _two_of(value)
    if flipped:
        settings |= _other_shapes(names)
    for name, sub in (kind.sub_configs or {}).items():
        if name in names and dataclasses.is_dataclass(sub) and name not in changed:
            settings[name] = _shrunk(sub, {}, flipped).to_dict()
    return kind(**(settings | changed))


def _other_shapes(names: dict[str, str]) -> dict[str, Any]:
    """One key head, wider than the hidden size asks for; a window where the family can have one."""
    settings: dict[str, Any] = {}
    if "head_dim" in names and "kv_lora_rank" not in names:
        settings["head_dim"] = 24
    if "num_key_value_heads" in names and "kv_lora_rank" not in names:
        settings["num_key_value_heads"] = 1
    if "sliding_window" in names:
        settings["sliding_window"] = WINDOW
        if "layer_types" in names:
            settings["layer_types"] = ["sliding_attention", "full_attention"]
    return settings


def _two_of(kinds: list[Any]) -> list[Any]:
    """One layer of each of two kinds, where there are two."""
    first = kinds[0]
    return [first, next((k for k in kinds if k != first), first)]


def randomise(lm: Any, seed: int = 0) -> None:
    """Weights of unit gain, and everything else away from its neutral value."""
    generator = torch.Generator().manual_seed(seed)

    def noise(x: torch.Tensor) -> torch.Tensor:
        return torch.randn(x.shape, generator=generator).to(x)

    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(noise(parameter) * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.2 * noise(parameter))
        for name, buffer in lm.named_buffers():
            if "correction_bias" in name:
                buffer.copy_(0.2 * noise(buffer))
