"""Fused training forwards for the families of decoder_layer.py: less memory traffic and less rounding.

Modules and parameters keep their names; only their forwards are replaced. The residual stream is float32,
as in the rollout engine: with 16-bit rounding at every layer, rollout and training would diverge.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.models.attention import Layout
from hone.models.decoder_layer import (
    FAMILIES,
    GatedMlp,
    LayerModule,
    NormModule,
    SelfAttention,
    attention_options,
    linear_modules,
)
from hone.ops.attention import SegmentLayout
from hone.ops.decoder_halves import Linear, Norm, add_gated_mlp, rotated_qkv, silu_gate
from hone.ops.logprobs import linear_fp32
from hone.ops.rms_norm import plain_rms_norm, rms_norm
from hone.ops.rotary import plain_rotate, rotate
from hone.types import Function

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hone.models.policy import Model


def fuse(model: nn.Module, *, kernels: bool = True) -> int:
    """Replaces the forwards of supported modules by fused ones and returns the number of these modules.

    With `kernels=False`, the new forwards have no Triton kernels, so that torch.compile can trace them.
    """
    lm: PreTrainedModel = getattr(model, "lm", model)
    family = FAMILIES.get(getattr(lm.config, "model_type", ""))
    if family is None:
        return 0
    count = 0
    for name, module in lm.named_modules():
        class_name = type(module).__name__
        forward: Function | None = None
        if class_name == f"{family}DecoderLayer" and kernels and _is_fusable(module):
            forward = _layer_forward
        elif class_name == f"{family}RMSNorm":
            forward = partial(_norm_forward, kernels=kernels)
        elif class_name == f"{family}Attention":
            forward = partial(_attention_forward, kernels=kernels)
        elif (
            class_name == f"{family}MLP" and kernels and isinstance(module.act_fn, _silu_classes())
        ):
            forward = _mlp_forward
        elif type(module) is nn.Embedding and name.endswith("embed_tokens"):
            forward = _embedding_forward
        elif class_name == f"{family}RotaryEmbedding":
            forward = partial(_rotary_forward, dtype=lm.dtype)
        if forward is not None:
            module.forward = MethodType(forward, module)
            count += 1
    return count


def _is_fusable(layer: LayerModule) -> bool:
    """Whether a layer has SiLU, biases only in q, k and v, no adapters and no query and key norms."""
    projections = linear_modules(layer)
    return (
        all(type(x) is nn.Linear for x in projections)
        and all(x.bias is None for x in projections[3:])  # o, gate, up, down
        and not hasattr(layer.self_attn, "q_norm")
        and isinstance(layer.mlp.act_fn, _silu_classes())
    )


def _silu_classes() -> tuple[type, ...]:
    from transformers.activations import ACT2FN

    return nn.SiLU, type(ACT2FN["silu"])


def _layer_forward(
    self: LayerModule,
    hidden_states: Tensor,  # [1, N, d] float32
    *,
    position_embeddings: tuple[Tensor, Tensor],
    layout: Layout,
    **_: Tensor | float | None,
) -> Tensor:
    attention, mlp = self.self_attn, self.mlp
    norms = [
        Norm(module.weight, module.variance_epsilon)
        for module in (self.input_layernorm, self.post_attention_layernorm)
    ]
    q_linear, k_linear, v_linear = (
        Linear(module.weight, module.bias)
        for module in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    cos, sin = (angles[0] for angles in position_embeddings)
    q, k, v, x = rotated_qkv(hidden_states[0], norms[0], q_linear, k_linear, v_linear, (cos, sin))
    out = layout.attend(q, k, v, attention_options(attention))
    x = x + linear_fp32(out.flatten(1), attention.o_proj.weight)
    weights = (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
    return add_gated_mlp(x, norms[1], *weights)[None]


def _rotary_forward(
    self: nn.Module, x: Tensor, position_ids: Tensor, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines in the dtype of the weights; the residual stream `x` is float32."""
    return type(self).forward(self, x.new_empty(0, dtype=dtype), position_ids)


def _attention_forward(
    self: SelfAttention,
    hidden_states: Tensor,  # [1, N, d]
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    *,
    layout: Layout,
    kernels: bool,
    **_: Tensor | float | None,
) -> tuple[Tensor, None]:
    q, k, v = (
        proj(hidden_states)[0].unflatten(-1, (-1, self.head_dim))
        for proj in (self.q_proj, self.k_proj, self.v_proj)
    )
    if hasattr(self, "q_norm"):
        q, k = self.q_norm(q), self.k_norm(k)
    cos, sin = (x[0] for x in position_embeddings)
    rotation = rotate if kernels else plain_rotate
    q, k = rotation(q, cos, sin), rotation(k, cos, sin)
    out = layout.attend(q, k, v, attention_options(self)).flatten(1)[None]
    return _residual_linear(self.o_proj, out) if kernels else self.o_proj(out), None


def _norm_forward(self: NormModule, hidden_states: Tensor, *, kernels: bool) -> Tensor:
    norm = rms_norm if kernels else plain_rms_norm
    return norm(hidden_states, self.weight, self.variance_epsilon)


def _mlp_forward(self: GatedMlp, x: Tensor) -> Tensor:
    return _residual_linear(self.down_proj, silu_gate(self.gate_proj(x), self.up_proj(x)))


def _residual_linear(linear: nn.Module, x: Tensor) -> Tensor:
    """Applies a linear layer whose output is added to the residual stream, in float32 if possible."""
    if type(linear) is nn.Linear and linear.bias is None:
        return linear_fp32(x, linear.weight)
    return linear(x)  # the layer has a bias, adapters or quantized weights


def _embedding_forward(self: nn.Embedding, ids: Tensor) -> Tensor:
    return F.embedding(ids, self.weight, self.padding_idx).float()


def compile_layers(model: Model) -> int:
    """Compiles every decoder layer in place with torch.compile and returns the number of layers.

    The layers have the same code, so they share one compilation. Attention is excluded from the compiled
    graphs, because the shape of its layout changes with every batch.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    if not hasattr(SegmentLayout.attend, "_torchdynamo_disable"):
        SegmentLayout.attend = torch.compiler.disable(SegmentLayout.attend)  # type: ignore[method-assign]
    layers = [m for m in model.decoder.modules() if isinstance(m, GradientCheckpointingLayer)]
    for layer in layers:
        layer.compile(dynamic=True)
    return len(layers)
