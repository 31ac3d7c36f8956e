"""Rotary positions applied to queries and keys: rounded once, one kernel each way on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.ops.autograd import Context


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [N, H, D]; [N, D]
    """Each head's halves turned against each other by its token's angle."""
    if x.is_cuda:
        return _Rotate.apply(x, cos, sin)
    return plain_rotate(x, cos, sin)


def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same in torch's own operations."""
    first, second = x.float().chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return (x.float() * cos.float()[:, None] + turned * sin.float()[:, None]).to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """[N, H, D] rotated, or with `back` the gradient of that; itself without gradient."""
    if x.is_cuda:
        from hone.ops.rotary_triton import turn

        return turn(x.contiguous(), cos, sin, back=back)
    if not back:
        return plain_rotate(x, cos, sin)
    g, half = x.float(), x.shape[-1] // 2
    across = g * sin.float()[:, None]
    across = torch.cat([across[..., half:], -across[..., :half]], -1)
    return (g * cos.float()[:, None] + across).to(x.dtype)


def turn_apart(
    qkv: Tensor,  # [N, (H + 2 KV) D]
    cos: Tensor,  # [N, D]
    sin: Tensor,
    *,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:  # [N, H, D], [N, KV, D] twice
    """Queries and keys of one product, rotated, and its values; itself without gradient."""
    if qkv.is_cuda:
        from hone.ops.rotary_triton import split_turned

        return split_turned(qkv, cos, sin, kv_heads=kv_heads)
    heads = qkv.unflatten(1, (-1, cos.shape[-1]))
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    return plain_rotate(q, cos, sin), plain_rotate(k, cos, sin), v.contiguous()


def turn_together(g_q: Tensor, g_k: Tensor, g_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of that product."""
    if g_q.is_cuda:
        from hone.ops.rotary_triton import join_turned

        return join_turned(g_q, g_k, g_v, cos, sin)
    back = [turned(g, cos, sin, back=True) for g in (g_q, g_k)]
    return torch.cat([*back, g_v], 1).flatten(1)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return turned(grads[0], *ctx.saved_tensors, back=True), None, None
