"""The parts of a decoder layer before and after attention, each as one autograd function.

One autograd node per operation would take as much host time as GPU time. These functions also save
fewer tensors: the backward pass recomputes norms and gated products.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops.autograd import Context
from hone.ops.logprobs import matmul_fp32
from hone.ops.rms_norm import norm_backward, norm_forward
from hone.ops.rotary import join_gradients, split_and_rotate


class Norm(NamedTuple):
    """The parameters of an RMS norm."""

    weight: Tensor
    eps: float


class Linear(NamedTuple):
    """The parameters of a linear layer."""

    weight: Tensor
    bias: Tensor | None


def rotated_qkv(
    x: Tensor,  # [N, d] float32
    norm: Norm,
    q: Linear,
    k: Linear,
    v: Linear,
    cos_sin: tuple[Tensor, Tensor],  # of the rotary embedding, [N, D] each
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # [N, H, D], [N, KV, D] twice, [N, d]
    """Returns the queries and keys, both rotated, and the values of the normalized tokens; and x itself.

    The caller uses the returned x in the residual sum, so that one kernel adds its two gradients.
    """
    return _RotatedQkv.apply(x, *norm, *q, *k, *v, *cos_sin)


def add_gated_mlp(
    x: Tensor, norm: Norm, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor
) -> Tensor:
    """Returns x + mlp(norm(x)), [N, d] float32."""
    return _AddGatedMlp.apply(x, *norm, gate_weight, up_weight, down_weight)


class _RotatedQkv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, x: Tensor, norm_weight: Tensor, eps: float,
        q: Tensor, q_bias: Tensor | None, k: Tensor, k_bias: Tensor | None,
        v: Tensor, v_bias: Tensor | None, cos: Tensor, sin: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        h, inverse_rms = norm_forward(x, norm_weight, eps)
        biases = [b for b in (q_bias, k_bias, v_bias) if b is not None]
        assert len(biases) in (0, 3), "either all of q, k and v have a bias or none has"
        qkv = F.linear(h, torch.cat([q, k, v]), torch.cat(biases) if biases else None)
        ctx.save_for_backward(x, norm_weight, inverse_rms, q, k, v, cos, sin)
        ctx.eps = eps
        return *split_and_rotate(qkv, cos, sin, kv_heads=len(k) // cos.shape[-1]), x

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, norm_weight, inverse_rms, *weights, cos, sin = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad
        h, _ = norm_forward(x, norm_weight, ctx.eps)
        g_q, g_k, g_v, g_residual = grads
        g = join_gradients(g_q, g_k, g_v, cos, sin)
        g_x, g_norm_weight = norm_backward(
            x, norm_weight, inverse_rms, g @ torch.cat(weights), g_residual
        )
        out_features, no_grads = [len(w) for w in weights], [None] * 3
        g_weights = (g.t() @ h).split(out_features) if any(needs_grad[3:9:2]) else no_grads
        g_biases = g.sum(0).split(out_features) if any(needs_grad[4:9:2]) else no_grads
        g_linears = itertools.chain.from_iterable(zip(g_weights, g_biases, strict=True))
        return (g_x, g_norm_weight if needs_grad[1] else None, None, *g_linears, None, None)


class _AddGatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, x: Tensor, norm_weight: Tensor, eps: float,
        gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor,
    ) -> Tensor:  # fmt: skip
        h, inverse_rms = norm_forward(x, norm_weight, eps)
        gate, up = F.linear(h, gate_weight), F.linear(h, up_weight)
        weights = (gate_weight, up_weight, down_weight)
        ctx.save_for_backward(x, norm_weight, inverse_rms, *weights, gate, up)
        ctx.eps = eps
        return x + matmul_fp32(gate_forward(gate, up), down_weight)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, norm_weight, inverse_rms, *weights, gate, up = ctx.saved_tensors
        gate_weight, up_weight, down_weight = weights
        needs_grad = ctx.needs_input_grad
        h, _ = norm_forward(x, norm_weight, ctx.eps)
        g = grads[0].to(h.dtype)
        g_gate, g_up, gated = gate_backward(gate, up, g @ down_weight)
        g_h = (g_gate @ gate_weight).addmm_(g_up, up_weight)
        g_x, g_norm_weight = norm_backward(x, norm_weight, inverse_rms, g_h, grads[0])
        weight_grad_factors = ((g_gate, h), (g_up, h), (g, gated))
        return (
            g_x,
            g_norm_weight if needs_grad[1] else None,
            None,
            *(
                a.t() @ b if needs else None
                for (a, b), needs in zip(weight_grad_factors, needs_grad[3:], strict=True)
            ),
        )


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) · up."""
    return _SiluGate.apply(gate, up) if gate.is_cuda else gate_forward(gate, up)


def gate_forward(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) · up; on a GPU the result has no gradient."""
    if not gate.is_cuda:
        return F.silu(gate) * up
    from hone.ops.gated_triton import silu_gate_forward

    return silu_gate_forward(gate, up)


def gate_backward(gate: Tensor, up: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of gate and up, and the recomputed silu(gate) · up."""
    if gate.is_cuda:
        from hone.ops.gated_triton import silu_gate_backward

        return silu_gate_backward(gate, up, g)
    s = torch.sigmoid(gate)
    return g * up * s * (1.0 + gate * (1.0 - s)), g * gate * s, gate * s * up


class _SiluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return gate_forward(gate, up)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return gate_backward(gate, up, grads[0].contiguous())[:2]
