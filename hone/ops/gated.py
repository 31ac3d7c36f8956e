"""silu(gate) · up in one kernel each way on a GPU; what is kept for backward is the two inputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """The product of a gated MLP's two halves, same shape as either."""
    if not gate.is_cuda:
        return F.silu(gate) * up
    return _SiluGate.apply(gate, up)


class _SiluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        from hone.ops.gated_triton import silu_gate_forward

        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return silu_gate_forward(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        from hone.ops.gated_triton import silu_gate_backward

        gate, up = ctx.saved_tensors
        return silu_gate_backward(gate, up, grads[0].contiguous())
