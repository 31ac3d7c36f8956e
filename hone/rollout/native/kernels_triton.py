"""The engine's GPU kernels but attention and sampling: norm, gate, rotation with cache write.

Imported only when a GPU decodes. Each public function has the signature and the result of its namesake
in kernels_reference.py. Cache memory is reached through an address held on the device, so that a
captured graph outlives the memory it was captured with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from hone.rollout.native.kernels_reference import Turn
    from hone.rollout.native.paged_cache import PagedCache


@triton.jit
def _add_rms_norm(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    real = column < WIDTH
    at = row * WIDTH + column
    x = tl.load(x_ptr + at, real, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + at, real, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, rounded, real)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + column, real, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x * scale * weight).to(out_ptr.dtype.element_ty), real)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    out = torch.empty_like(x, dtype=weight.dtype)
    total = torch.empty_like(x, dtype=torch.float32) if residual is not None else x
    padded = triton.next_power_of_2(width)
    _add_rms_norm[(rows,)](
        x,
        residual if residual is not None else x,
        weight,
        out,
        total,
        eps,
        WIDTH=width,
        PADDED=padded,
        ADD=residual is not None,
        num_warps=4 if padded <= 2048 else 8,
    )
    return out, total


@triton.jit
def _silu_mul(x_ptr, out_ptr, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < width
    gate = tl.load(x_ptr + row * 2 * width + column, real, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + column, real, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up  # rounded once, as in training
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), real)


def silu_mul(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    block = min(1024, triton.next_power_of_2(width))
    _silu_mul[(rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _rope_store(  # type: ignore[no-untyped-def]
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    slot_ptr,
    q_out_ptr,
    k_out_ptr,
    base_ptr,
    k_at: tl.int64,
    v_at: tl.int64,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    KEEP_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = D // 2
    h = tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, HALF)[None, :]
    inside = i < half
    real = inside & (h < H + 2 * KV)
    dtype = qkv_ptr.dtype.element_ty
    start = qkv_ptr + token * ((H + 2 * KV) * D) + h * D + i
    first = tl.load(start, real, other=0.0)
    second = tl.load(start + half, real, other=0.0)
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    if NORM:
        square = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        scale = tl.rsqrt(square / D + eps)[:, None]
        is_q = h < H
        for_q = tl.load(q_norm_ptr + i, inside, other=0.0).to(tl.float32)
        for_k = tl.load(k_norm_ptr + i, inside, other=0.0).to(tl.float32)
        a = (a * scale * tl.where(is_q, for_q, for_k)).to(dtype).to(tl.float32)
        for_q = tl.load(q_norm_ptr + half + i, inside, other=0.0).to(tl.float32)
        for_k = tl.load(k_norm_ptr + half + i, inside, other=0.0).to(tl.float32)
        b = (b * scale * tl.where(is_q, for_q, for_k)).to(dtype).to(tl.float32)
    turn = tl.load(position_ptr + token) * D + i
    cos_a = tl.load(cos_ptr + turn, inside, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_ptr + turn + half, inside, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_ptr + turn, inside, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_ptr + turn + half, inside, other=0.0).to(tl.float32)
    turned = h < H + KV
    first = tl.where(turned, (a * cos_a - b * sin_a).to(dtype), first)
    second = tl.where(turned, (b * cos_b + a * sin_b).to(dtype), second)
    q_out = q_out_ptr + (token * H + h) * D + i
    tl.store(q_out, first, inside & (h < H))
    tl.store(q_out + half, second, inside & (h < H))
    kv_head = (h - H + KV) % KV
    if KEEP_K:
        is_k = inside & (h >= H) & turned
        k_out = k_out_ptr + (token * KV + kv_head) * D + i
        tl.store(k_out, first, is_k)
        tl.store(k_out + half, second, is_k)
    slot = tl.load(slot_ptr + token)
    cell = ((slot // PAGE) * KV + kv_head) * PAGE + slot % PAGE
    plane = tl.where(turned, k_at, v_at)
    cache = tl.load(base_ptr).to(tl.pointer_type(dtype)) + plane + cell * D + i
    kept = real & (h >= H)
    tl.store(cache, first, kept)
    tl.store(cache + half, second, kept)


def rope_store(
    qkv: Tensor,
    turn: Turn,
    positions: Tensor,
    slots: Tensor,
    cache: PagedCache,
    layer: int,
    *,
    keep_keys: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, kv, d = qkv.shape[0], cache.kv_heads, cache.head_dim
    heads = qkv.shape[1] // d - 2 * kv
    q = qkv.new_empty(tokens, heads, d)
    k = qkv.new_empty(tokens if keep_keys else 0, kv, d)
    k_at, v_at = cache.planes(layer)
    _rope_store[(tokens,)](
        qkv, turn.cos, turn.sin, positions, slots, q, k, cache.base, k_at, v_at,
        turn.q_norm if turn.q_norm is not None else qkv,
        turn.k_norm if turn.k_norm is not None else qkv,
        turn.eps,
        H=heads, KV=kv, D=d, HEADS=triton.next_power_of_2(heads + 2 * kv),
        HALF=triton.next_power_of_2(d // 2), PAGE=cache.page_size,
        NORM=turn.q_norm is not None, KEEP_K=keep_keys, num_warps=4,
    )  # fmt: skip
    v = qkv[:, (heads + kv) * d :].view(tokens, kv, d)
    return q, k, v


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    k_ptr,
    v_ptr,
    slot_ptr,
    base_ptr,
    k_at: tl.int64,
    v_at: tl.int64,
    k_stride,
    v_stride,
    k_head_stride,
    v_head_stride,
    KV: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, PADDED)
    real = i < D
    slot = tl.load(slot_ptr + token)
    cell = ((slot // PAGE) * KV + head) * PAGE + slot % PAGE
    base = tl.load(base_ptr).to(tl.pointer_type(k_ptr.dtype.element_ty)) + cell * D
    tl.store(
        base + k_at + i, tl.load(k_ptr + token * k_stride + head * k_head_stride + i, real), real
    )
    tl.store(
        base + v_at + i, tl.load(v_ptr + token * v_stride + head * v_head_stride + i, real), real
    )


def store(k: Tensor, v: Tensor, slots: Tensor, cache: PagedCache, layer: int) -> None:
    k_at, v_at = cache.planes(layer)
    _store[(slots.shape[0], cache.kv_heads)](
        k, v, slots, cache.base, k_at, v_at, k.stride(0), v.stride(0), k.stride(1), v.stride(1),
        KV=cache.kv_heads, D=cache.head_dim, PADDED=triton.next_power_of_2(cache.head_dim),
        PAGE=cache.page_size, num_warps=1,
    )  # fmt: skip
