"""Fewer passes over memory and fewer roundings in training, for the parts of families that are known.

The modules, their parameters and their names stay; only how they compute changes. The residual stream is
summed in float32, as the rollout engine sums it: rounded to 16 bits at every layer, the two would drift.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.models.attention import Layout, window_of
from hone.models.plain_shape import (
    FAMILIES,
    PlainAttention,
    PlainLayer,
    PlainMlp,
    PlainNorm,
    linears,
)
from hone.ops.decoder_halves import Linear, Norm, gated_half, heads_of
from hone.ops.gated import silu_gate
from hone.ops.rms_norm import plain_rms_norm, rms_norm
from hone.ops.rotary import plain_rotate, rotate
from hone.ops.wide_product import wide_linear
from hone.types import Function

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def fuse(model: nn.Module, *, kernels: bool = True) -> int:
    """Give what is known its own forward; returns how many modules. Without `kernels` a compiler
    can look into all of them."""
    lm: PreTrainedModel = getattr(model, "lm", model)
    family = FAMILIES.get(getattr(lm.config, "model_type", ""))
    if family is None:
        return 0
    found = 0
    for name, module in lm.named_modules():
        kind = type(module).__name__
        own: Function | None = None
        if kind == f"{family}DecoderLayer" and kernels and _is_plain(module):
            own = _layer
        elif kind == f"{family}RMSNorm":
            own = _norm if kernels else _plain_norm
        elif kind == f"{family}Attention":
            own = _attention if kernels else _plain_attention
        elif kind == f"{family}MLP" and kernels and isinstance(module.act_fn, _silu_classes()):
            own = _mlp
        elif type(module) is nn.Embedding and name.endswith("embed_tokens"):
            own = _embedding
        elif kind == f"{family}RotaryEmbedding":
            own = partial(_rotary, dtype=lm.dtype)
        if own is not None:
            module.forward = MethodType(own, module)
            found += 1
    return found


def _is_plain(layer: PlainLayer) -> bool:
    """Whether every part is what the family's own is: no adapters, no norms or biases besides."""
    maps = linears(layer)
    return (
        all(type(x) is nn.Linear for x in maps)
        and all(x.bias is None for x in maps[3:])
        and not hasattr(layer.self_attn, "q_norm")
        and isinstance(layer.mlp.act_fn, _silu_classes())
    )


def _layer(
    self: PlainLayer,
    hidden_states: Tensor,  # [1, N, d] float32
    *,
    position_embeddings: tuple[Tensor, Tensor],
    layout: Layout,
    **_: Tensor | float | None,
) -> Tensor:
    attention, mlp, x = self.self_attn, self.mlp, hidden_states[0]
    cos, sin = (turn[0] for turn in position_embeddings)
    q, k, v, x = heads_of(
        x,
        _norm_of(self.input_layernorm),
        _map_of(attention.q_proj),
        _map_of(attention.k_proj),
        _map_of(attention.v_proj),
        (cos, sin),
    )
    out = layout.attend(
        q,
        k,
        v,
        layer=attention.layer_idx,
        scaling=attention.scaling,
        window=window_of(attention),
    )
    x = x + wide_linear(out.flatten(1), attention.o_proj.weight)
    return gated_half(
        x,
        _norm_of(self.post_attention_layernorm),
        mlp.gate_proj.weight,
        mlp.up_proj.weight,
        mlp.down_proj.weight,
    )[None]


def _norm_of(module: PlainNorm) -> Norm:
    return Norm(module.weight, module.variance_epsilon)


def _map_of(module: nn.Linear) -> Linear:
    return Linear(module.weight, module.bias)


def _rotary(
    self: nn.Module, x: Tensor, position_ids: Tensor, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines in 16 bits where the weights are, though the sums they meet are float32."""
    return type(self).forward(self, x.new_empty(0, dtype=dtype), position_ids)


def _silu_classes() -> tuple[type, ...]:
    from transformers.activations import ACT2FN

    return nn.SiLU, type(ACT2FN["silu"])


def _attention(self: PlainAttention, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return _into_residual(self.o_proj, _attended(self, *args, turn=rotate, **kwargs)), None


def _plain_attention(self: PlainAttention, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return self.o_proj(_attended(self, *args, turn=plain_rotate, **kwargs)), None


def _attended(
    self: PlainAttention,
    hidden_states: Tensor,  # [1, N, d]
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    *,
    layout: Layout,
    turn: Callable[[Tensor, Tensor, Tensor], Tensor],
    **_: Tensor | float | None,
) -> Tensor:  # [1, N, H D]
    q, k, v = (
        proj(hidden_states)[0].unflatten(-1, (-1, self.head_dim))
        for proj in (self.q_proj, self.k_proj, self.v_proj)
    )
    if hasattr(self, "q_norm"):
        q, k = self.q_norm(q), self.k_norm(k)
    cos, sin = (x[0] for x in position_embeddings)
    out = layout.attend(
        turn(q, cos, sin),
        turn(k, cos, sin),
        v,
        layer=self.layer_idx,
        scaling=self.scaling,
        window=window_of(self),
    )
    return out.flatten(1)[None]


def _norm(self: PlainNorm, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _plain_norm(self: PlainNorm, hidden_states: Tensor) -> Tensor:
    return plain_rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _mlp(self: PlainMlp, x: Tensor) -> Tensor:
    return _into_residual(self.down_proj, silu_gate(self.gate_proj(x), self.up_proj(x)))


def _into_residual(linear: nn.Module, x: Tensor) -> Tensor:
    """What a float32 sum takes up need not be rounded to 16 bits before."""
    if type(linear) is nn.Linear and linear.bias is None:
        return wide_linear(x, linear.weight)
    return linear(x)  # adapters, quantisation


def _embedding(self: nn.Embedding, ids: Tensor) -> Tensor:
    return F.embedding(ids, self.weight, self.padding_idx).float()
