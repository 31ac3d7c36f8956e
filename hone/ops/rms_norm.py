"""RMS norm of float32 sums into the weight's dtype: one kernel each way on a GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [..., d]
    """x / rms(x) · weight, computed in float32 whatever comes in."""
    if x.is_cuda:
        return _RmsNorm.apply(x, weight, eps)
    return plain_rms_norm(x, weight, eps)


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same in torch's own operations."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(weight.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from hone.ops.rms_norm_triton import rms_norm_forward

        flat = x.reshape(-1, x.shape[-1]).contiguous()
        out, scale = rms_norm_forward(flat, weight, eps)
        ctx.save_for_backward(flat, weight, scale)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from hone.ops.rms_norm_triton import rms_norm_backward

        x, weight, scale = ctx.saved_tensors
        g = grads[0].reshape(x.shape).contiguous()
        g_x, g_weight = rms_norm_backward(x, weight, scale, g)
        return g_x.view(grads[0].shape), g_weight if ctx.needs_input_grad[1] else None, None
