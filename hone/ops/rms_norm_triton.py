"""GPU kernels of the RMS norm and its gradient; the reference is rms_norm.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 528
"""Programs of the backward pass; each sums the weight gradient of a part of the rows."""


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, scale_ptr, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    mask = column < WIDTH
    offsets = row * WIDTH + column
    x = tl.load(x_ptr + offsets, mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + offsets, mask, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + offsets, rounded, mask)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    if SCALE:
        tl.store(scale_ptr + row, scale)
    weight = tl.load(weight_ptr + column, mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, (x * scale * weight).to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, scale_ptr, g_ptr, plus_ptr, g_x_ptr, part_ptr, rows,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PLUS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    i = tl.arange(0, PADDED)
    mask = i < WIDTH
    weight = tl.load(weight_ptr + i, mask, other=0.0).to(tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        offsets = tl.cast(row, tl.int64) * WIDTH + i
        scale = tl.load(scale_ptr + row)
        x = tl.load(x_ptr + offsets, mask, other=0.0).to(tl.float32) * scale
        g = tl.load(g_ptr + offsets, mask, other=0.0).to(tl.float32)
        total += g * x
        g *= weight
        projection = tl.sum(g * x, 0) / WIDTH
        g = (g - x * projection) * scale
        if PLUS:
            g += tl.load(plus_ptr + offsets, mask, other=0.0).to(tl.float32)
        tl.store(g_x_ptr + offsets, g.to(g_x_ptr.dtype.element_ty), mask)
    tl.store(part_ptr + program * WIDTH + i, total, mask)


def _launch_options(width: int) -> dict[str, int]:
    padded = triton.next_power_of_2(width)
    return {"WIDTH": width, "PADDED": padded, "num_warps": 4 if padded <= 2048 else 8}


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the norm of rows [N, d] in the weight's dtype, and 1 / rms per row [N]."""
    x = x.contiguous()
    rows, width = x.shape
    out = torch.empty_like(x, dtype=weight.dtype)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    _forward[(rows,)](
        x, x, weight, out, x, scale, eps, ADD=False, SCALE=True, **_launch_options(width)
    )
    return out, scale


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns the norm of `x + residual` in the weight's dtype, and the sum in float32."""
    rows, width = x.shape
    out = torch.empty_like(x, dtype=weight.dtype)
    total = torch.empty_like(x, dtype=torch.float32) if residual is not None else x
    _forward[(rows,)](
        x, x if residual is None else residual, weight, out, total, x, eps,
        ADD=residual is not None, SCALE=False, **_launch_options(width),
    )  # fmt: skip
    return out, total


def rms_norm_backward(
    x: Tensor, weight: Tensor, scale: Tensor, g: Tensor, plus: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the rows, plus `plus`, and of the weight, each in its dtype."""
    x, g = x.contiguous(), g.contiguous()
    plus = None if plus is None else plus.contiguous()
    rows, width = x.shape
    programs = max(1, min(_PROGRAMS, rows))
    g_x = torch.empty_like(x)
    part = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _backward[(programs,)](
        x, weight, scale, g, g if plus is None else plus, g_x, part, rows,
        PLUS=plus is not None, **_launch_options(width),
    )  # fmt: skip
    return g_x, part.sum(0).to(weight.dtype)
