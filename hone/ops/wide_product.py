"""Products of 16-bit matrices with a float32 result; on a GPU it is not rounded to 16 bits.

Log-probs of rollout and trainer differ less if logits and the residual stream are not rounded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops.autograd import Context


def wide_product(x: Tensor, weight: Tensor) -> Tensor:  # [M, d], [V, d] -> [M, V] float32
    """Returns x · Wᵀ in float32, without gradient."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return (x @ weight.t()).float()  # on a CPU, the product is rounded to 16 bits


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:  # [M, V] float32, [M, K], [K, V]
    """Computes total += a · b, on a GPU without an intermediate tensor."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.add_(a @ b)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:  # [..., d], [V, d] -> [..., V] float32
    """Returns x · Wᵀ in float32; gradients are computed in the inputs' dtype, as in F.linear."""
    if not x.is_cuda:
        return F.linear(x, weight).float()
    return _WideLinear.apply(x, weight)


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(flat, weight)
        return wide_product(flat, weight).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        g = grads[0].reshape(len(x), -1).to(x.dtype)
        g_x = (g @ weight).view(*grads[0].shape[:-1], -1) if ctx.needs_input_grad[0] else None
        return g_x, g.t() @ x if ctx.needs_input_grad[1] else None
