"""silu(gate) · up in one kernel each way on a GPU; what is kept for backward is the two inputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops.wide_product import wide_product


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """The product of a gated MLP's two halves, same shape as either."""
    if not gate.is_cuda:
        return F.silu(gate) * up
    return _SiluGate.apply(gate, up)


def gated_product(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:  # [..., d], 2 [F, d] -> [..., F]
    """silu(x · gateᵀ) · (x · upᵀ), on a GPU rounded to x's dtype once, at the end."""
    if not x.is_cuda:
        return F.silu(F.linear(x, gate)) * F.linear(x, up)
    return _GatedProduct.apply(x, gate, up)


class _SiluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        from hone.ops.gated_triton import silu_gate_forward

        gate, up = gate.contiguous(), up.contiguous()
        out, *kept = silu_gate_forward(gate, up, gate.dtype)
        ctx.save_for_backward(*kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        from hone.ops.gated_triton import silu_gate_backward

        gate, up = ctx.saved_tensors
        return silu_gate_backward(gate, up, grads[0].contiguous())


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        from hone.ops.gated_triton import silu_gate_forward

        flat = x.reshape(-1, x.shape[-1])
        out, *kept = silu_gate_forward(wide_product(flat, gate), wide_product(flat, up), x.dtype)
        ctx.save_for_backward(flat, gate, up, *kept)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from hone.ops.gated_triton import silu_gate_backward

        x, gate, up, gated, raised = ctx.saved_tensors
        g = grads[0].reshape(len(x), -1).contiguous()
        g_gate, g_up = silu_gate_backward(gated, raised, g)
        g_x = None
        if ctx.needs_input_grad[0]:
            g_x = torch.addmm(g_gate @ gate, g_up, up).view(*grads[0].shape[:-1], -1)
        return (
            g_x,
            g_gate.t() @ x if ctx.needs_input_grad[1] else None,
            g_up.t() @ x if ctx.needs_input_grad[2] else None,
        )
