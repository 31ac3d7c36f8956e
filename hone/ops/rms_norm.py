"""RMS norm in the weight's dtype, with one forward and one backward kernel on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops.autograd import Context


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [..., d]
    """Returns x / rms(x) · weight, computed in float32 for every input dtype."""
    return _RmsNorm.apply(x, weight, eps) if x.is_cuda else plain_rms_norm(x, weight, eps)


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes `rms_norm` with torch operations."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(weight.dtype)


def norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the norm of rows [N, d] in the weight's dtype, and 1 / rms per row [N]."""
    if x.is_cuda:
        from hone.ops.rms_norm_triton import rms_norm_forward

        return rms_norm_forward(x, weight, eps)
    scale = torch.rsqrt(x.float().square().mean(-1) + eps)
    return (x.float() * scale[:, None] * weight.float()).to(weight.dtype), scale


def norm_backward(
    x: Tensor, weight: Tensor, scale: Tensor, g: Tensor, plus: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the rows, plus `plus`, and of the weight, each in its dtype."""
    if x.is_cuda:
        from hone.ops.rms_norm_triton import rms_norm_backward

        return rms_norm_backward(x, weight, scale, g, plus)
    unit, g = x.float() * scale[:, None], g.float()
    g_weight = (g * unit).sum(0).to(weight.dtype)
    g = g * weight.float()
    g_x = (g - unit * (g * unit).mean(-1, keepdim=True)) * scale[:, None]
    return (g_x if plus is None else g_x + plus).to(x.dtype), g_weight


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        out, scale = norm_forward(flat, weight, eps)
        ctx.save_for_backward(flat, weight, scale)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        g_x, g_weight = norm_backward(x, weight, scale, grads[0].reshape(x.shape).contiguous())
        return g_x.view(grads[0].shape), g_weight if ctx.needs_input_grad[1] else None, None
