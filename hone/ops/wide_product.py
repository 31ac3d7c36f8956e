"""x · Wᵀ with a float32 result where the device can: the sums are float32, only the last rounding goes.

Logits lose most when rounded to 16 bits. Summands of the residual stream are rounded once less in rollout
and trainer, so the two stay closer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops.autograd import Context


def wide_product(x: Tensor, weight: Tensor) -> Tensor:  # [M, d], [V, d] -> [M, V] float32
    """Without gradient."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return (x @ weight.t()).float()  # a CPU has no such product: in 16 bits it rounds


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:  # [M, V] float32, [M, K], [K, V]
    """total += a · b, where the device can without a product in between."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.add_(a @ b)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:  # [..., d], [V, d] -> [..., V] float32
    """With gradients, which are computed in the inputs' dtype as a plain product's are."""
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
