"""The GPU kernel of accumulate.py, which gets the addresses of all tensors."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.ops.transfer import send

_BLOCK = 4096


@triton.jit
def _add(  # type: ignore[no-untyped-def]
    like_ptr, address_ptr, count_ptr, owner_ptr, first_ptr, tensors,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    owner = tl.load(owner_ptr + program)
    first = tl.load(first_ptr + program)
    count = tl.load(count_ptr + owner)
    total = tl.load(address_ptr + owner).to(tl.pointer_type(tl.float32))
    part = tl.load(address_ptr + tensors + owner).to(tl.pointer_type(like_ptr.dtype.element_ty))
    total, part = tl.multiple_of(total, 16), tl.multiple_of(part, 16)
    i = tl.multiple_of(first, BLOCK) + tl.arange(0, BLOCK)
    mask = i < count
    value = tl.load(total + i, mask, other=0.0) + tl.load(part + i, mask, other=0.0).to(tl.float32)
    tl.store(total + i, value, mask)


def add_all(sums: list[Tensor], parts: list[Tensor]) -> None:
    device = sums[0].device
    count, owner, first = _blocks(tuple(t.numel() for t in sums), device)
    addresses = send(torch.tensor([t.data_ptr() for t in (*sums, *parts)]), device)
    _add[(len(owner),)](
        parts[0], addresses, count, owner, first, len(sums), BLOCK=_BLOCK, num_warps=4
    )


@functools.lru_cache(maxsize=8)
def _blocks(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the size of each tensor, and the tensor and first element of each program."""
    count = torch.tensor(counts)
    blocks = -(-count // _BLOCK)
    owner = torch.arange(len(counts)).repeat_interleave(blocks)
    blocks_before = (blocks.cumsum(0) - blocks).repeat_interleave(blocks)
    first = (torch.arange(len(owner)) - blocks_before) * _BLOCK
    return count.to(device), owner.to(device), first.to(device)
