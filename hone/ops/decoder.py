"""The operations of a decoder layer in training, as autograd functions, with Triton kernels on a GPU.

`rotated_qkv` and `add_gated_mlp` are the parts of a layer before and after attention, each with one autograd
node: one node per operation would take as much host time as GPU time. The two functions also save fewer
tensors: the backward pass recomputes norms and gated products.

In shapes, N is the number of tokens, H of query heads and KV of key-value heads; d is the width of the
model and D the head dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops.autograd import Context
from hone.ops.logprobs import matmul_fp32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [..., d]
    """Returns x / rms(x) · weight, computed in float32 for every input dtype."""
    return _RmsNorm.apply(x, weight, eps) if x.is_cuda else plain_rms_norm(x, weight, eps)


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes `rms_norm` with torch operations."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(weight.dtype)


def norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the normalized rows [N, d] in the weight's dtype, and 1 / rms of each row [N]."""
    if x.is_cuda:
        from hone.ops.training_triton import rms_norm_forward

        return rms_norm_forward(x, weight, eps)
    inverse_rms = torch.rsqrt(x.float().square().mean(-1) + eps)
    return (x.float() * inverse_rms[:, None] * weight.float()).to(weight.dtype), inverse_rms


def norm_backward(
    x: Tensor, weight: Tensor, inverse_rms: Tensor, g: Tensor, g_residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and of the weight; `g_residual` is added to the gradient of x."""
    if x.is_cuda:
        from hone.ops.training_triton import rms_norm_backward

        return rms_norm_backward(x, weight, inverse_rms, g, g_residual)
    normalized, g = x.float() * inverse_rms[:, None], g.float()
    g_weight = (g * normalized).sum(0).to(weight.dtype)
    g = g * weight.float()
    g_x = (g - normalized * (g * normalized).mean(-1, keepdim=True)) * inverse_rms[:, None]
    return (g_x if g_residual is None else g_x + g_residual).to(x.dtype), g_weight


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        out, inverse_rms = norm_forward(flat, weight, eps)
        ctx.save_for_backward(flat, weight, inverse_rms)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse_rms = ctx.saved_tensors
        g_x, g_weight = norm_backward(
            x, weight, inverse_rms, grads[0].reshape(x.shape).contiguous()
        )
        return g_x.view(grads[0].shape), g_weight if ctx.needs_input_grad[1] else None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x: [N, H, D]; cos, sin: [N, D]
    """Rotates each head by the angles of its token, given as cosines and sines."""
    return _Rotate.apply(x, cos, sin) if x.is_cuda else plain_rotate(x, cos, sin)


def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Computes `rotate` with torch operations."""
    first, second = x.float().chunk(2, -1)
    swapped_halves = torch.cat([-second, first], -1)
    return (x.float() * cos.float()[:, None] + swapped_halves * sin.float()[:, None]).to(x.dtype)


def split_and_rotate(
    qkv: Tensor,  # [N, (H + 2 KV) D]
    cos: Tensor,  # [N, D]
    sin: Tensor,
    *,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:  # [N, H, D], [N, KV, D] twice
    """Splits `qkv` into queries, keys and values, and rotates queries and keys; has no gradient."""
    if qkv.is_cuda:
        from hone.ops import training_triton

        return training_triton.split_and_rotate(qkv, cos, sin, kv_heads=kv_heads)
    heads = qkv.unflatten(1, (-1, cos.shape[-1]))
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    return plain_rotate(q, cos, sin), plain_rotate(k, cos, sin), v.contiguous()


def join_gradients(g_q: Tensor, g_k: Tensor, g_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns the gradient of the input `qkv` of `split_and_rotate`."""
    if g_q.is_cuda:
        from hone.ops import training_triton

        return training_triton.join_gradients(g_q, g_k, g_v, cos, sin)
    return torch.cat([*(_inverse_rotate(g, cos, sin) for g in (g_q, g_k)), g_v], 1).flatten(1)


def _inverse_rotate(g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    g_float, half = g.float(), g.shape[-1] // 2
    g_sin = g_float * sin.float()[:, None]
    swapped_halves = torch.cat([g_sin[..., half:], -g_sin[..., :half]], -1)
    return (g_float * cos.float()[:, None] + swapped_halves).to(g.dtype)


class _Rotate(torch.autograd.Function):
    """Rotates on a GPU: `split_and_rotate` without keys and values."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return split_and_rotate(x.flatten(1), cos, sin, kv_heads=0)[0]

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        empty = grads[0][:, :0]
        g = join_gradients(grads[0], empty, empty, *ctx.saved_tensors)
        return g.view(grads[0].shape), None, None


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
    qkv: Sequence[Linear],
    cos_sin: tuple[Tensor, Tensor],  # of the rotary embedding, [N, D] each
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # [N, H, D], [N, KV, D] twice, [N, d]
    """Returns the queries and keys, both rotated, and the values of the normalized tokens; and x itself.

    The caller uses the returned x in the residual sum, so that one kernel adds its two gradients.
    """
    return _RotatedQkv.apply(x, *norm, *itertools.chain.from_iterable(qkv), *cos_sin)


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
    from hone.ops.training_triton import silu_gate_forward

    return silu_gate_forward(gate, up)


def gate_backward(gate: Tensor, up: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of gate and up, and the recomputed silu(gate) · up."""
    if gate.is_cuda:
        from hone.ops.training_triton import silu_gate_backward

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
