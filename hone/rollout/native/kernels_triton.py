"""The GPU kernels of the native engine: gated product, and rotation with cache write.

This module is imported only on a GPU. It also exports the kernels of attention_triton.py and
sampling_triton.py. Public functions have the signatures and results of those in
kernels_reference.py. Kernels load the address of the cache from device memory, so captured graphs
stay valid when the cache is allocated again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from hone.ops.rms_norm_triton import add_rms_norm as add_rms_norm
from hone.rollout.native.attention_triton import decode_attention as decode_attention
from hone.rollout.native.attention_triton import rope_attention as rope_attention
from hone.rollout.native.sampling_triton import advance as advance
from hone.rollout.native.sampling_triton import sample as sample

if TYPE_CHECKING:
    from hone.rollout.native.kernels_reference import RotaryTable
    from hone.rollout.native.paged_cache import PagedCache


@triton.jit
def _silu_mul(x_ptr, out_ptr, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(x_ptr + row * 2 * width + column, mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + column, mask, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up  # rounded once, as in training
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    block = min(1024, triton.next_power_of_2(width))
    _silu_mul[(rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _rope_store(  # type: ignore[no-untyped-def]
    qkv_ptr, cos_ptr, sin_ptr, position_ptr, slot_ptr, q_out_ptr, k_out_ptr, base_ptr,
    k_offset: tl.int64, v_offset: tl.int64, q_norm_ptr, k_norm_ptr, eps,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HEADS_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr, RETURN_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = D // 2
    h = tl.arange(0, HEADS_PAD)[:, None]
    i = tl.arange(0, HALF_PAD)[None, :]
    in_half = i < half
    mask = in_half & (h < H + 2 * KV)
    dtype = qkv_ptr.dtype.element_ty
    head_ptr = qkv_ptr + token * ((H + 2 * KV) * D) + h * D + i
    first = tl.load(head_ptr, mask, other=0.0)
    second = tl.load(head_ptr + half, mask, other=0.0)
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    if NORM:
        square_sum = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        scale = tl.rsqrt(square_sum / D + eps)[:, None]
        is_q = h < H
        q_weight = tl.load(q_norm_ptr + i, in_half, other=0.0).to(tl.float32)
        k_weight = tl.load(k_norm_ptr + i, in_half, other=0.0).to(tl.float32)
        a = (a * scale * tl.where(is_q, q_weight, k_weight)).to(dtype).to(tl.float32)
        q_weight = tl.load(q_norm_ptr + half + i, in_half, other=0.0).to(tl.float32)
        k_weight = tl.load(k_norm_ptr + half + i, in_half, other=0.0).to(tl.float32)
        b = (b * scale * tl.where(is_q, q_weight, k_weight)).to(dtype).to(tl.float32)
    rotary_offset = tl.load(position_ptr + token) * D + i
    cos_a = tl.load(cos_ptr + rotary_offset, in_half, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_ptr + rotary_offset + half, in_half, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_ptr + rotary_offset, in_half, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_ptr + rotary_offset + half, in_half, other=0.0).to(tl.float32)
    rotated = h < H + KV
    first = tl.where(rotated, (a * cos_a - b * sin_a).to(dtype), first)
    second = tl.where(rotated, (b * cos_b + a * sin_b).to(dtype), second)
    q_out = q_out_ptr + (token * H + h) * D + i
    tl.store(q_out, first, in_half & (h < H))
    tl.store(q_out + half, second, in_half & (h < H))
    kv_head = (h - H + KV) % KV
    if RETURN_K:
        is_k = in_half & (h >= H) & rotated
        k_out = k_out_ptr + (token * KV + kv_head) * D + i
        tl.store(k_out, first, is_k)
        tl.store(k_out + half, second, is_k)
    slot = tl.load(slot_ptr + token)
    slot_offset = ((slot // BLOCK_SIZE) * KV + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    layer_offset = tl.where(rotated, k_offset, v_offset)
    cache_ptr = tl.load(base_ptr).to(tl.pointer_type(dtype)) + layer_offset + slot_offset * D + i
    kv_mask = mask & (h >= H)
    tl.store(cache_ptr, first, kv_mask)
    tl.store(cache_ptr + half, second, kv_mask)


def rope_store(
    qkv: Tensor,
    rotary: RotaryTable,
    positions: Tensor,
    slots: Tensor,
    cache: PagedCache,
    layer: int,
    *,
    return_keys: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, kv, d = qkv.shape[0], cache.kv_heads, cache.head_dim
    heads = qkv.shape[1] // d - 2 * kv
    q = qkv.new_empty(tokens, heads, d)
    k = qkv.new_empty(tokens if return_keys else 0, kv, d)
    k_offset, v_offset = cache.kv_offsets(layer)
    _rope_store[(tokens,)](
        qkv, rotary.cos, rotary.sin, positions, slots, q, k, cache.base_address, k_offset, v_offset,
        rotary.q_norm if rotary.q_norm is not None else qkv,
        rotary.k_norm if rotary.k_norm is not None else qkv,
        rotary.eps,
        H=heads, KV=kv, D=d, HEADS_PAD=triton.next_power_of_2(heads + 2 * kv),
        HALF_PAD=triton.next_power_of_2(d // 2), BLOCK_SIZE=cache.block_size,
        NORM=rotary.q_norm is not None, RETURN_K=return_keys, num_warps=4,
    )  # fmt: skip
    v = qkv[:, (heads + kv) * d :].view(tokens, kv, d)
    return q, k, v


@triton.jit
def _store_kv(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, slot_ptr, base_ptr, k_offset: tl.int64, v_offset: tl.int64, k_stride, v_stride,
    k_head_stride, v_head_stride,
    KV: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, D_PAD)
    mask = i < D
    slot = tl.load(slot_ptr + token)
    slot_offset = ((slot // BLOCK_SIZE) * KV + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    base = tl.load(base_ptr).to(tl.pointer_type(k_ptr.dtype.element_ty)) + slot_offset * D
    tl.store(
        base + k_offset + i,
        tl.load(k_ptr + token * k_stride + head * k_head_stride + i, mask),
        mask,
    )
    tl.store(
        base + v_offset + i,
        tl.load(v_ptr + token * v_stride + head * v_head_stride + i, mask),
        mask,
    )


def store_kv(k: Tensor, v: Tensor, slots: Tensor, cache: PagedCache, layer: int) -> None:
    k_offset, v_offset = cache.kv_offsets(layer)
    _store_kv[(slots.shape[0], cache.kv_heads)](
        k, v, slots, cache.base_address, k_offset, v_offset, k.stride(0), v.stride(0),
        k.stride(1), v.stride(1),
        KV=cache.kv_heads, D=cache.head_dim, D_PAD=triton.next_power_of_2(cache.head_dim),
        BLOCK_SIZE=cache.block_size, num_warps=1,
    )  # fmt: skip
