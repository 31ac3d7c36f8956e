"""Fewer passes over memory and fewer roundings in training, for the parts of families that are known.

The modules, their parameters and their names stay; only how they compute changes. The residual stream is
summed in float32, as the rollout engine sums it: rounded to 16 bits at every layer, the two would drift.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hone.models.attention import Layout, window_of
from hone.ops.decoder_halves import Linear, Norm, gated_half, heads_of
from hone.ops.gated import silu_gate
from hone.ops.rms_norm import plain_rms_norm, rms_norm
from hone.ops.rotary import plain_rotate, rotate
from hone.ops.wide_product import wide_linear

_FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def fuse(model: nn.Module, *, kernels: bool = True) -> int:
    """Give what is known its own forward; returns how many modules. Without `kernels` a compiler
    can look into all of them."""
    lm: Any = getattr(model, "lm", model)
    family = _FAMILIES.get(getattr(lm.config, "model_type", ""))
    if family is None:
        return 0
    found = 0
    for name, module in lm.named_modules():
        kind = type(module).__name__
        own: Any = None
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
            module.hone_dtype, own = lm.dtype, _rotary
        if own is not None:
            module.forward = MethodType(own, module)
            found += 1
    return found


def _is_plain(layer: Any) -> bool:
    """Whether every part is what the family's own is: no adapters, no norms or biases besides."""
    a, m = layer.self_attn, layer.mlp
    maps = (a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj)
    return (
        all(type(x) is nn.Linear for x in maps)
        and all(x.bias is None for x in maps[3:])
        and not hasattr(a, "q_norm")
        and isinstance(m.act_fn, _silu_classes())
    )


def _layer(
    self: Any,
    hidden_states: Tensor,  # [1, N, d] float32
    *,
    position_embeddings: tuple[Tensor, Tensor],
    layout: Layout,
    **_: Any,
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


def _norm_of(module: Any) -> Norm:
    return Norm(module.weight, module.variance_epsilon)


def _map_of(module: Any) -> Linear:
    return Linear(module.weight, module.bias)


def _rotary(self: Any, x: Tensor, position_ids: Tensor) -> Any:
    """Cosines and sines in 16 bits where the weights are, though the sums they meet are float32."""
    return type(self).forward(self, x.new_empty(0, dtype=self.hone_dtype), position_ids)


def _silu_classes() -> tuple[type, ...]:
    from transformers.activations import ACT2FN

    return nn.SiLU, type(ACT2FN["silu"])


def _attention(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return _into_residual(self.o_proj, _attended(self, *args, turn=rotate, **kwargs)), None


def _plain_attention(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return self.o_proj(_attended(self, *args, turn=plain_rotate, **kwargs)), None


def _attended(
    self: Any,
    hidden_states: Tensor,  # [1, N, d]
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    *,
    layout: Layout,
    turn: Callable[[Tensor, Tensor, Tensor], Tensor],
    **_: Any,
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


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _plain_norm(self: Any, hidden_states: Tensor) -> Tensor:
    return plain_rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _mlp(self: Any, x: Tensor) -> Tensor:
    return _into_residual(self.down_proj, silu_gate(self.gate_proj(x), self.up_proj(x)))


def _into_residual(linear: Any, x: Tensor) -> Tensor:
    """What a float32 sum takes up need not be rounded to 16 bits before."""
    if type(linear) is nn.Linear and linear.bias is None:
        return wide_linear(x, linear.weight)
    return linear(x)  # adapters, quantisation


def _embedding(self: Any, ids: Tensor) -> Tensor:
    return F.embedding(ids, self.weight, self.padding_idx).float()
