"""GPU kernels of the RMS norm and its gradient; the reference is rms_norm.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BACKWARD_PROGRAMS = 528
"""Number of programs of the backward pass; each sums the weight gradient of a part of the rows."""


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, inverse_rms_ptr, eps,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, ADD_RESIDUAL: tl.constexpr,
    STORE_INVERSE_RMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PAD)
    mask = column < WIDTH
    offsets = row * WIDTH + column
    x = tl.load(x_ptr + offsets, mask, other=0.0).to(tl.float32)
    if ADD_RESIDUAL:
        x += tl.load(residual_ptr + offsets, mask, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + offsets, rounded, mask)
        x = rounded.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    if STORE_INVERSE_RMS:
        tl.store(inverse_rms_ptr + row, inverse_rms)
    weight = tl.load(weight_ptr + column, mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, (x * inverse_rms * weight).to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, inverse_rms_ptr, g_ptr, g_residual_ptr, g_x_ptr, g_weight_ptr, rows,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    i = tl.arange(0, WIDTH_PAD)
    mask = i < WIDTH
    weight = tl.load(weight_ptr + i, mask, other=0.0).to(tl.float32)
    g_weight = tl.zeros([WIDTH_PAD], tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        offsets = tl.cast(row, tl.int64) * WIDTH + i
        inverse_rms = tl.load(inverse_rms_ptr + row)
        x = tl.load(x_ptr + offsets, mask, other=0.0).to(tl.float32) * inverse_rms
        g = tl.load(g_ptr + offsets, mask, other=0.0).to(tl.float32)
        g_weight += g * x
        g *= weight
        projection = tl.sum(g * x, 0) / WIDTH
        g = (g - x * projection) * inverse_rms
        if HAS_RESIDUAL:
            g += tl.load(g_residual_ptr + offsets, mask, other=0.0).to(tl.float32)
        tl.store(g_x_ptr + offsets, g.to(g_x_ptr.dtype.element_ty), mask)
    tl.store(g_weight_ptr + program * WIDTH + i, g_weight, mask)


def _launch_options(width: int) -> dict[str, int]:
    padded_width = triton.next_power_of_2(width)
    return {
        "WIDTH": width,
        "WIDTH_PAD": padded_width,
        "num_warps": 4 if padded_width <= 2048 else 8,
    }


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the normalized rows [N, d] in the weight's dtype, and 1 / rms of each row [N]."""
    x = x.contiguous()
    rows, width = x.shape
    out = torch.empty_like(x, dtype=weight.dtype)
    inverse_rms = torch.empty(rows, dtype=torch.float32, device=x.device)
    _forward[(rows,)](
        x,
        x,
        weight,
        out,
        x,
        inverse_rms,
        eps,
        ADD_RESIDUAL=False,
        STORE_INVERSE_RMS=True,
        **_launch_options(width),
    )
    return out, inverse_rms


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns `x + residual` normalized, in the weight's dtype, and the float32 sum (or x, if not summed)."""
    rows, width = x.shape
    out = torch.empty_like(x, dtype=weight.dtype)
    total = torch.empty_like(x, dtype=torch.float32) if residual is not None else x
    _forward[(rows,)](
        x, x if residual is None else residual, weight, out, total, x, eps,
        ADD_RESIDUAL=residual is not None, STORE_INVERSE_RMS=False, **_launch_options(width),
    )  # fmt: skip
    return out, total


def rms_norm_backward(
    x: Tensor, weight: Tensor, inverse_rms: Tensor, g: Tensor, g_residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and of the weight; `g_residual` is added to the gradient of x."""
    x, g = x.contiguous(), g.contiguous()
    g_residual = None if g_residual is None else g_residual.contiguous()
    rows, width = x.shape
    programs = max(1, min(_BACKWARD_PROGRAMS, rows))
    g_x = torch.empty_like(x)
    g_weight_parts = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _backward[(programs,)](
        x, weight, inverse_rms, g, g if g_residual is None else g_residual, g_x, g_weight_parts,
        rows, HAS_RESIDUAL=g_residual is not None, **_launch_options(width),
    )  # fmt: skip
    return g_x, g_weight_parts.sum(0).to(weight.dtype)
