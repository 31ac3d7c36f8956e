"""The gated product silu(gate) · up, with one forward and one backward kernel on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops.autograd import Context


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) · up."""
    return _SiluGate.apply(gate, up) if gate.is_cuda else gate_forward(gate, up)


def gate_forward(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) · up; on a GPU the result has no gradient."""
    if not gate.is_cuda:
        return F.silu(gate) * up
    from hone.ops.gated_triton import silu_gate_forward

    return silu_gate_forward(gate, up)


def gate_backward(gate: Tensor, up: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of gate and up, and the recomputed silu(gate) · up."""
    if gate.is_cuda:
        from hone.ops.gated_triton import silu_gate_backward

        return silu_gate_backward(gate, up, g)
    s = torch.sigmoid(gate)
    return g * up * s * (1.0 + gate * (1.0 - s)), g * gate * s, gate * s * up


class _SiluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return gate_forward(gate, up)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return gate_backward(gate, up, grads[0].contiguous())[:2]
