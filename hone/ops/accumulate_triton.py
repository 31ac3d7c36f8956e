"""The GPU kernel that sums the gradients of engine/optimizer.py, with one launch for all tensors."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.ops.device import send

_BLOCK = 4096


@triton.jit
def _add(  # type: ignore[no-untyped-def]
    part_dtype_ptr, address_ptr, num_elements_ptr, tensor_index_ptr, first_element_ptr, num_tensors,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tensor_index = tl.load(tensor_index_ptr + program)
    first_element = tl.load(first_element_ptr + program)
    num_elements = tl.load(num_elements_ptr + tensor_index)
    total = tl.load(address_ptr + tensor_index).to(tl.pointer_type(tl.float32))
    part = tl.load(address_ptr + num_tensors + tensor_index).to(
        tl.pointer_type(part_dtype_ptr.dtype.element_ty)
    )
    total, part = tl.multiple_of(total, 16), tl.multiple_of(part, 16)
    i = tl.multiple_of(first_element, BLOCK) + tl.arange(0, BLOCK)
    mask = i < num_elements
    value = tl.load(total + i, mask, other=0.0) + tl.load(part + i, mask, other=0.0).to(tl.float32)
    tl.store(total + i, value, mask)


def add_all(sums: list[Tensor], parts: list[Tensor]) -> None:
    """Computes sums[i] += parts[i] for all i in one launch."""
    device = sums[0].device
    num_elements, tensor_index, first_element = _program_table(
        tuple(t.numel() for t in sums), device
    )
    addresses = send(torch.tensor([t.data_ptr() for t in (*sums, *parts)]), device)
    _add[(len(tensor_index),)](
        parts[0],
        addresses,
        num_elements,
        tensor_index,
        first_element,
        len(sums),
        BLOCK=_BLOCK,
        num_warps=4,
    )


@functools.lru_cache(maxsize=8)
def _program_table(
    element_counts: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the number of elements per tensor, and each program's tensor index and first element."""
    num_elements = torch.tensor(element_counts)
    blocks = -(-num_elements // _BLOCK)
    tensor_index = torch.arange(len(element_counts)).repeat_interleave(blocks)
    blocks_before = (blocks.cumsum(0) - blocks).repeat_interleave(blocks)
    first_element = (torch.arange(len(tensor_index)) - blocks_before) * _BLOCK
    return num_elements.to(device), tensor_index.to(device), first_element.to(device)
