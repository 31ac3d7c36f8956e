"""The decoder layer that llama, qwen2, qwen3 and mistral share, as a dataclass of its parameters.

Training (fused.py) and the native engine read layer parameters through this class. All other models, and
models with wrapped layers (adapters, quantisation), run through their Hugging Face modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from hone.models.attention import attention_window
from hone.ops.attention import AttentionOptions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from hone.models.policy import PolicyModel

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""The prefix of the class names of each family, by its `model_type`."""
_FIXED_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}
"""Values of `rope_type` whose rotary table does not depend on the length of the sequence."""
L = TypeVar("L")
N = TypeVar("N")


class NormModule(Protocol):
    """An RMS norm."""

    weight: Tensor
    variance_epsilon: float

    def __call__(self, x: Tensor) -> Tensor: ...


class SelfAttention(Protocol):
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    q_norm: NormModule
    """Only qwen3 has q_norm and k_norm."""
    k_norm: NormModule
    layer_idx: int
    head_dim: int
    scaling: float
    config: PreTrainedConfig


class GatedMlp(Protocol):
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear
    act_fn: nn.Module


class LayerModule(Protocol):
    """A decoder layer of transformers."""

    self_attn: SelfAttention
    mlp: GatedMlp
    input_layernorm: NormModule
    post_attention_layernorm: NormModule


@dataclass(frozen=True)
class DecoderLayer(Generic[L, N]):
    """The linear layers (type L), norms (type N) and attention options of one decoder layer."""

    qkv: L
    out: L
    gate_up: L
    down: L
    norm_in: N
    norm_mlp: N
    q_norm: N | None
    k_norm: N | None
    attention: AttentionOptions
    heads: int
    kv_heads: int
    head_dim: int


def read_layer(
    layer: LayerModule, *, join: Callable[[Sequence[nn.Linear]], L], norm: Callable[[NormModule], N]
) -> DecoderLayer[L, N]:
    """Returns the parameters of a layer.

    `join` merges linear modules that share an input; `norm` converts a norm module.
    """
    attention, mlp = layer.self_attn, layer.mlp
    return DecoderLayer(
        join([attention.q_proj, attention.k_proj, attention.v_proj]),
        join([attention.o_proj]),
        join([mlp.gate_proj, mlp.up_proj]),
        join([mlp.down_proj]),
        norm(layer.input_layernorm),
        norm(layer.post_attention_layernorm),
        norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        attention_options(attention),
        attention.q_proj.weight.shape[0] // attention.head_dim,
        attention.k_proj.weight.shape[0] // attention.head_dim,
        attention.head_dim,
    )


def attention_options(attention: SelfAttention) -> AttentionOptions:
    """Returns the attention options of a layer's attention module."""
    return AttentionOptions(attention.layer_idx, attention.scaling, attention_window(attention))


def linear_modules(layer: LayerModule) -> tuple[nn.Linear, ...]:
    """Returns the linear modules of a layer: q, k, v, o, gate, up, down."""
    a, m = layer.self_attn, layer.mlp
    return (a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj)


def fits_decoder_layer(policy: PolicyModel) -> bool:
    """Whether all layers fit `DecoderLayer`: SiLU, a fixed rotary table, no adapters and no hooks."""
    config, decoder = policy.lm.config, policy.decoder
    if hasattr(policy.lm, "peft_config") or config.model_type not in FAMILIES:
        return False
    rope_type = getattr(decoder.rotary_emb, "rope_type", "default")
    is_silu = config.hidden_act in ("silu", "swish")
    has_hooks = any(m._forward_hooks or m._forward_pre_hooks for m in decoder.modules())
    has_plain_linears = all(
        type(m) is nn.Linear for layer in decoder.layers for m in linear_modules(layer)
    )
    has_fixed_rope = rope_type in _FIXED_ROPE_TYPES
    return is_silu and has_fixed_rope and not has_hooks and has_plain_linears


def rotary_table(decoder: PreTrainedModel, num_positions: int) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines [P, D] of the first `num_positions` positions, in the decoder's dtype."""
    dtype_example = decoder.embed_tokens.weight[:1].detach()
    cos, sin = decoder.rotary_emb(
        dtype_example, torch.arange(num_positions, device=dtype_example.device)[None]
    )
    return cos[0].contiguous(), sin[0].contiguous()
