"""RMS norm with a result in the weight's dtype; one forward and one backward kernel on a GPU."""

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
    """Returns the normalized rows [N, d] in the weight's dtype, and 1 / rms of each row [N]."""
    if x.is_cuda:
        from hone.ops.rms_norm_triton import rms_norm_forward

        return rms_norm_forward(x, weight, eps)
    inverse_rms = torch.rsqrt(x.float().square().mean(-1) + eps)
    return (x.float() * inverse_rms[:, None] * weight.float()).to(weight.dtype), inverse_rms


def norm_backward(
    x: Tensor, weight: Tensor, inverse_rms: Tensor, g: Tensor, g_residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and of the weight; `g_residual` is added to the gradient of x."""
    if x.is_cuda:
        from hone.ops.rms_norm_triton import rms_norm_backward

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
