"""GPU kernels for shared_keys.py, which copy keys and values and sum the gradients of the copies."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, source_ptr, k_out_ptr, v_out_ptr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH_PAD)
    mask = i < WIDTH
    source = tl.load(source_ptr + row).to(tl.int64) * WIDTH
    tl.store(k_out_ptr + row * WIDTH + i, tl.load(k_ptr + source + i, mask), mask)
    tl.store(v_out_ptr + row * WIDTH + i, tl.load(v_ptr + source + i, mask), mask)


@triton.jit
def _sum_copies(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, copy_index_ptr, first_copy_ptr, k_out_ptr, v_out_ptr,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH_PAD)
    mask = i < WIDTH
    k = tl.zeros([WIDTH_PAD], tl.float32)
    v = tl.zeros([WIDTH_PAD], tl.float32)
    for copy in range(tl.load(first_copy_ptr + token), tl.load(first_copy_ptr + token + 1)):
        offsets = tl.load(copy_index_ptr + copy).to(tl.int64) * WIDTH + i
        k += tl.load(k_ptr + offsets, mask, other=0.0).to(tl.float32)
        v += tl.load(v_ptr + offsets, mask, other=0.0).to(tl.float32)
    tl.store(k_out_ptr + token * WIDTH + i, k.to(k_out_ptr.dtype.element_ty), mask)
    tl.store(v_out_ptr + token * WIDTH + i, v.to(v_out_ptr.dtype.element_ty), mask)


def gather(k: Tensor, v: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    width = k[0].numel()
    outs = [torch.empty(len(source), *k.shape[1:], dtype=k.dtype, device=k.device) for _ in "kv"]
    _gather[(len(source),)](
        k, v, source, *outs, WIDTH=width, WIDTH_PAD=triton.next_power_of_2(width), num_warps=1
    )
    return outs[0], outs[1]


def sum_copies(
    g_k: Tensor, g_v: Tensor, copy_indices: Tensor, first_copy: Tensor
) -> tuple[Tensor, Tensor]:
    width, tokens = g_k[0].numel(), len(first_copy) - 1
    outs = [torch.empty(tokens, *g.shape[1:], dtype=g.dtype, device=g.device) for g in (g_k, g_v)]
    _sum_copies[(tokens,)](
        g_k, g_v, copy_indices, first_copy, *outs,
        WIDTH=width, WIDTH_PAD=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return outs[0], outs[1]
