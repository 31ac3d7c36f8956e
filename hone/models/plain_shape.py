"""The parts of the decoder shape that llama, qwen2, qwen3 and mistral share, as transformers names them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""`model_type` of each family, and the name that its classes begin with."""


class PlainNorm(Protocol):
    """An RMS norm."""

    weight: Tensor
    variance_epsilon: float

    def __call__(self, x: Tensor) -> Tensor: ...


class PlainAttention(Protocol):
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    q_norm: PlainNorm
    """Of qwen3 only, as k_norm."""
    k_norm: PlainNorm
    layer_idx: int
    head_dim: int
    scaling: float
    config: PreTrainedConfig


class PlainMlp(Protocol):
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear
    act_fn: nn.Module


class PlainLayer(Protocol):
    self_attn: PlainAttention
    mlp: PlainMlp
    input_layernorm: PlainNorm
    post_attention_layernorm: PlainNorm


def rotary_table(decoder: PreTrainedModel, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [W, D] of the positions below `width`, in the decoder's dtype."""
    like = decoder.embed_tokens.weight[:1].detach()
    cos, sin = decoder.rotary_emb(like, torch.arange(width, device=like.device)[None])
    return cos[0].contiguous(), sin[0].contiguous()


def linears(layer: PlainLayer) -> tuple[nn.Linear, ...]:
    a, m = layer.self_attn, layer.mlp
    return (a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj)
