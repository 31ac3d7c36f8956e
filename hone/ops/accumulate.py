"""Adds 16-bit gradients to float32 sums, on a GPU in one kernel for all tensors.

Torch adds tensors of different dtypes one by one and without vectorised loads.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def accumulate(sums: list[Tensor], parts: list[Tensor]) -> None:
    """Computes sums[i] += parts[i] for all i."""
    if _can_use_kernel(sums, parts):
        from hone.ops.accumulate_triton import add_all

        add_all(sums, parts)
    elif sums:
        torch._foreach_add_(sums, parts)


def _can_use_kernel(sums: list[Tensor], parts: list[Tensor]) -> bool:
    """Returns whether all tensors are suitable for the kernel's vectorised loads."""
    return len(sums) > 1 and all(
        a.is_cuda
        and a.dtype == torch.float32
        and b.dtype == parts[0].dtype
        and a.is_contiguous()
        and b.is_contiguous()
        and a.data_ptr() % 16 == 0
        and b.data_ptr() % 16 == 0
        for a, b in zip(sums, parts, strict=True)
    )
