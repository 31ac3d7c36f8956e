"""What torch hands to the forward and the backward of an autograd function."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.autograd.function import FunctionCtx


class Context(FunctionCtx):
    """Torch's own, with the attributes that it and our functions set."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    eps: float
    factor: float
    softcap: float | None
    fused: bool
    plain: Callable[[Tensor], Tensor]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """None is saved as None."""
