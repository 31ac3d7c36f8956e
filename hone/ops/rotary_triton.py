"""The kernel that rotates queries and keys, forth and back. Imported only on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    H: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BACK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = D // 2
    h = tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, HALF)[None, :]
    inside = i < half
    real = inside & (h < H)
    at = token * H * D + h * D + i
    a = tl.load(x_ptr + at, real, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + at + half, real, other=0.0).to(tl.float32)
    angle = token * D + i
    cos_a = tl.load(cos_ptr + angle, inside, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_ptr + angle + half, inside, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_ptr + angle, inside, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_ptr + angle + half, inside, other=0.0).to(tl.float32)
    if BACK:
        first = a * cos_a + b * sin_b
        second = b * cos_b - a * sin_a
    else:
        first = a * cos_a - b * sin_a
        second = b * cos_b + a * sin_b
    tl.store(out_ptr + at, first.to(out_ptr.dtype.element_ty), real)
    tl.store(out_ptr + at + half, second.to(out_ptr.dtype.element_ty), real)


def turn(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """[N, H, D] rotated, or with `back` its gradient."""
    tokens, heads, d = x.shape
    out = torch.empty_like(x)
    _turn[(tokens,)](
        x, cos.contiguous(), sin.contiguous(), out, H=heads, D=d,
        HEADS=triton.next_power_of_2(heads), HALF=triton.next_power_of_2(d // 2), BACK=back,
        num_warps=4,
    )  # fmt: skip
    return out
