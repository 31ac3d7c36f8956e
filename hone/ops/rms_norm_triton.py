"""Kernels of the RMS norm and its gradient. Imported only on a GPU; the reference is rms_norm.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 528
"""Programs of the backward pass, each summing the weight's gradient over its share of the rows."""


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, out_ptr, scale_ptr, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PADDED)
    real = i < WIDTH
    x = tl.load(x_ptr + row * WIDTH + i, real, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + i, real, other=0.0).to(tl.float32)
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * WIDTH + i, (x * scale * weight).to(out_ptr.dtype.element_ty), real)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    scale_ptr,
    g_ptr,
    plus_ptr,
    g_x_ptr,
    part_ptr,
    rows,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PLUS: tl.constexpr,
):
    program = tl.program_id(0)
    i = tl.arange(0, PADDED)
    real = i < WIDTH
    weight = tl.load(weight_ptr + i, real, other=0.0).to(tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * WIDTH + i
        scale = tl.load(scale_ptr + row)
        x = tl.load(x_ptr + at, real, other=0.0).to(tl.float32) * scale
        g = tl.load(g_ptr + at, real, other=0.0).to(tl.float32)
        total += g * x
        g *= weight
        along = tl.sum(g * x, 0) / WIDTH
        g = (g - x * along) * scale
        if PLUS:
            g += tl.load(plus_ptr + at, real, other=0.0).to(tl.float32)
        tl.store(g_x_ptr + at, g.to(g_x_ptr.dtype.element_ty), real)
    tl.store(part_ptr + program * WIDTH + i, total, real)


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of [N, d] rows in the weight's dtype, and each row's factor [N]."""
    x = x.contiguous()
    rows, width = x.shape
    out = torch.empty_like(x, dtype=weight.dtype)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(width)
    _forward[(rows,)](
        x, weight, out, scale, eps, WIDTH=width, PADDED=padded,
        num_warps=4 if padded <= 2048 else 8,
    )  # fmt: skip
    return out, scale


def rms_norm_backward(
    x: Tensor, weight: Tensor, scale: Tensor, g: Tensor, plus: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of the rows, in their dtype and with `plus` added, and of the weight, in its."""
    x, g = x.contiguous(), g.contiguous()
    plus = None if plus is None else plus.contiguous()
    rows, width = x.shape
    programs = max(1, min(_PROGRAMS, rows))
    g_x = torch.empty_like(x)
    part = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(width)
    _backward[(programs,)](
        x, weight, scale, g, g if plus is None else plus, g_x, part, rows,
        WIDTH=width, PADDED=padded, PLUS=plus is not None,
        num_warps=4 if padded <= 2048 else 8,
    )  # fmt: skip
    return g_x, part.sum(0).to(weight.dtype)
