"""GPU kernels of silu(gate) · up and its gradients; the reference is in decoder_halves.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _forward(gate_ptr, up_ptr, out_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    gate = tl.load(gate_ptr + i, mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + i, mask, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + i, out.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, g_ptr, g_gate_ptr, g_up_ptr, out_ptr, count, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    gate = tl.load(gate_ptr + i, mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + i, mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + i, mask, other=0.0)
    s = tl.sigmoid(gate)
    dtype = g.dtype
    g = g.to(tl.float32)
    tl.store(out_ptr + i, (gate * s * up).to(dtype), mask)
    tl.store(g_up_ptr + i, (g * gate * s).to(dtype), mask)
    tl.store(g_gate_ptr + i, (g * up * s * (1.0 + gate * (1.0 - s))).to(dtype), mask)


def silu_gate_forward(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    grid = (triton.cdiv(gate.numel(), _BLOCK),)
    _forward[grid](gate, up, out, gate.numel(), BLOCK=_BLOCK, num_warps=8)
    return out


def silu_gate_backward(gate: Tensor, up: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns both gradients and silu(gate) · up, which is cheaper to recompute than to save."""
    gate, up, g = gate.contiguous(), up.contiguous(), g.contiguous()
    g_gate, g_up, out = (torch.empty_like(gate) for _ in range(3))
    grid = (triton.cdiv(gate.numel(), _BLOCK),)
    _backward[grid](gate, up, g, g_gate, g_up, out, gate.numel(), BLOCK=_BLOCK, num_warps=8)
    return g_gate, g_up, out
