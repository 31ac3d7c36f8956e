"""x · Wᵀ with a float32 result where the device can: logits lose most when rounded to 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_product(x: Tensor, weight: Tensor) -> Tensor:  # [M, d], [V, d] -> [M, V] float32
    """Without gradient; sums are float32 as they always are, only the last rounding is left out."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return (x @ weight.t()).float()  # a CPU has no such product: in 16 bits it rounds
