"""The decoder layer of llama, qwen2, qwen3 and mistral: its parameters, and its fused training forwards.

The native engine reads the parameters through `DecoderLayer`. `fuse` replaces the forwards of the modules
in training; modules and parameters keep their names. The residual stream is float32 in both: with 16-bit
rounding at every layer, rollout and training would diverge. All other models, and models with wrapped
layers (adapters, quantisation), run through their Hugging Face modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.models.families import DECODER_LAYER_FAMILIES
from hone.models.policy import Layout, attention_window
from hone.ops.attention import AttentionOptions, SegmentLayout
from hone.ops.decoder import (
    Linear,
    Norm,
    add_gated_mlp,
    plain_rms_norm,
    plain_rotate,
    rms_norm,
    rotate,
    rotated_qkv,
    silu_gate,
)
from hone.ops.logprobs import linear_fp32
from hone.types import Function

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.models.llama.modeling_llama import (
        LlamaAttention,
        LlamaDecoderLayer,
        LlamaMLP,
        LlamaRMSNorm,
    )

    from hone.models.policy import Model, PolicyModel

_FIXED_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}
"""Values of `rope_type` whose rotary table does not depend on the length of the sequence."""
LinearT = TypeVar("LinearT")
NormT = TypeVar("NormT")


@dataclass(frozen=True)
class DecoderLayer(Generic[LinearT, NormT]):
    """The linear layers, norms and attention options of one decoder layer."""

    qkv: LinearT
    out: LinearT
    gate_up: LinearT
    down: LinearT
    norm_in: NormT
    norm_mlp: NormT
    q_norm: NormT | None
    k_norm: NormT | None
    attention: AttentionOptions
    heads: int
    kv_heads: int
    head_dim: int


def read_layer(
    layer: LlamaDecoderLayer,
    *,
    join: Callable[[Sequence[nn.Linear]], LinearT],
    norm: Callable[[LlamaRMSNorm], NormT],
) -> DecoderLayer[LinearT, NormT]:
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


def attention_options(attention: LlamaAttention) -> AttentionOptions:
    """Returns the attention options of a layer's attention module."""
    return AttentionOptions(attention.layer_idx, attention.scaling, attention_window(attention))


def linear_modules(layer: LlamaDecoderLayer) -> tuple[nn.Linear, ...]:
    """Returns the linear modules of a layer: q, k, v, o, gate, up, down."""
    attention, mlp = layer.self_attn, layer.mlp
    return (
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    )


def fits_decoder_layer(policy: PolicyModel) -> bool:
    """Whether all layers fit `DecoderLayer`: SiLU, a fixed rotary table, no adapters and no hooks."""
    config, decoder = policy.lm.config, policy.decoder
    if hasattr(policy.lm, "peft_config") or config.model_type not in DECODER_LAYER_FAMILIES:
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


def fuse(model: nn.Module, *, kernels: bool = True) -> int:
    """Replaces the forwards of supported modules by fused ones and returns the number of these modules.

    With `kernels=False`, the new forwards have no Triton kernels, so that torch.compile can trace them.
    """
    lm: PreTrainedModel = getattr(model, "lm", model)
    family = DECODER_LAYER_FAMILIES.get(getattr(lm.config, "model_type", ""))
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


def _is_fusable(layer: LlamaDecoderLayer) -> bool:
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
    self: LlamaDecoderLayer,
    hidden_states: Tensor,  # [1, N, d] float32
    *,
    position_embeddings: tuple[Tensor, Tensor],
    layout: Layout,
    **_: Tensor | float | None,
) -> Tensor:
    layer = read_layer(self, join=_linears, norm=norm_parameters)
    cos, sin = (angles[0] for angles in position_embeddings)
    q, k, v, x = rotated_qkv(hidden_states[0], layer.norm_in, layer.qkv, (cos, sin))
    out = layout.attend(q, k, v, layer.attention)
    x = x + linear_fp32(out.flatten(1), layer.out[0].weight)
    mlp_weights = (linear.weight for linear in (*layer.gate_up, *layer.down))
    return add_gated_mlp(x, layer.norm_mlp, *mlp_weights)[None]


def _linears(modules: Sequence[nn.Linear]) -> list[Linear]:
    return [Linear(module.weight, module.bias) for module in modules]


def norm_parameters(module: LlamaRMSNorm) -> Norm:
    return Norm(module.weight, module.variance_epsilon)


def _rotary_forward(
    self: nn.Module, x: Tensor, position_ids: Tensor, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines in the dtype of the weights; the residual stream `x` is float32."""
    return type(self).forward(self, x.new_empty(0, dtype=dtype), position_ids)


def _attention_forward(
    self: LlamaAttention,
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


def _norm_forward(self: LlamaRMSNorm, hidden_states: Tensor, *, kernels: bool) -> Tensor:
    norm = rms_norm if kernels else plain_rms_norm
    return norm(hidden_states, self.weight, self.variance_epsilon)


def _mlp_forward(self: LlamaMLP, x: Tensor) -> Tensor:
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
