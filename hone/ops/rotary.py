"""Rotary embedding of queries and keys, with one forward and one backward kernel on a GPU.

In shapes, N is the number of tokens, H of query heads and KV of key-value heads; D is the head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.ops.autograd import Context


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
        from hone.ops import rotary_triton

        return rotary_triton.split_and_rotate(qkv, cos, sin, kv_heads=kv_heads)
    heads = qkv.unflatten(1, (-1, cos.shape[-1]))
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    return plain_rotate(q, cos, sin), plain_rotate(k, cos, sin), v.contiguous()


def join_gradients(g_q: Tensor, g_k: Tensor, g_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns the gradient of the input `qkv` of `split_and_rotate`."""
    if g_q.is_cuda:
        from hone.ops import rotary_triton

        return rotary_triton.join_gradients(g_q, g_k, g_v, cos, sin)
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
