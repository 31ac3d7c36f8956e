"""Rotary positions applied to queries and keys: rounded once, one kernel each way on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return turned(grads[0], *ctx.saved_tensors, back=True), None, None
