"""The type of `ctx` in autograd functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd.function import FunctionCtx

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Context(FunctionCtx):
    """Torch's FunctionCtx, with types for the attributes that torch and hone set on it."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    eps: float
    logit_factor: float
    softcap: float | None
    use_kernel: bool
    group: ProcessGroup
    start: int
    stop: int
    plain_forward: Callable[[Tensor], Tensor]
    backward_function: Callable[[Tensor, ProcessGroup], Tensor]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Saves tensors for the backward pass; torch allows None too."""
