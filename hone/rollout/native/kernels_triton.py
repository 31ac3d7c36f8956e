"""The engine's GPU kernels: norm, gate, rotation with cache write, paged decode attention.

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
    from hone.rollout.native.paged_cache import PagedCache

_NARROW = {"KEYS": 64, "num_warps": 2, "num_stages": 2}
_WIDE = {"KEYS": 64, "num_warps": 4, "num_stages": 3}
"""Keys one step of the attention loop reads, and how it is spread: heads up to 64 wide, and wider.

Blocks begin at multiples of KEYS and are taken from the last to the first, as torch's variable-length
kernel does in training: weights are rounded relative to the greatest score seen so far, and the same
order makes the same roundings. For narrow heads that kernel takes 128 keys at a time, which is slower
here; the first block of a sequence is then rounded otherwise."""


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
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: PagedCache,
    layer: int,
    *,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    keep_keys: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, kv, d = qkv.shape[0], cache.kv_heads, cache.head_dim
    heads = qkv.shape[1] // d - 2 * kv
    q = qkv.new_empty(tokens, heads, d)
    k = qkv.new_empty(tokens if keep_keys else 0, kv, d)
    k_at, v_at = cache.planes(layer)
    _rope_store[(tokens,)](
        qkv, cos, sin, positions, slots, q, k, cache.base, k_at, v_at,
        q_norm if q_norm is not None else qkv,
        k_norm if k_norm is not None else qkv,
        eps,
        H=heads, KV=kv, D=d, HEADS=triton.next_power_of_2(heads + 2 * kv),
        HALF=triton.next_power_of_2(d // 2), PAGE=cache.page_size,
        NORM=q_norm is not None, KEEP_K=keep_keys, num_warps=4,
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


@triton.jit
def _decode_attention(  # type: ignore[no-untyped-def]
    q_ptr,
    base_ptr,
    table_ptr,
    position_ptr,
    out_ptr,
    lse_ptr,
    k_at: tl.int64,
    v_at: tl.int64,
    scaling,
    table_stride,
    window,
    q_stride,
    q_head_stride,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    dtype = q_ptr.dtype.element_ty
    length = (tl.load(position_ptr + row) + 1).to(tl.int32)
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window, 0)
    lowest = first // KEYS
    blocks = tl.cdiv(length, KEYS)
    share = tl.cdiv(blocks - lowest, SPLITS)
    begin = lowest + split * share
    end = tl.minimum(begin + share, blocks)
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, D_PAD)
    q_real = (g < GROUP)[:, None] & (d < D)[None, :]
    head = kv_head * GROUP + g
    q = tl.load(
        q_ptr + row * q_stride + head[:, None] * q_head_stride + d[None, :], q_real, other=0.0
    )
    base = tl.load(base_ptr).to(tl.pointer_type(dtype))
    base = tl.multiple_of(base, 16)
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    norm = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
    log2e: tl.constexpr = 1.4426950408889634
    for done in range(end - begin):
        n = (end - 1 - done) * KEYS + tl.arange(0, KEYS)
        real = (n >= first) & (n < length)
        page = tl.load(table_ptr + row * table_stride + n // PAGE, real, other=0).to(tl.int64)
        cell = ((page * KV + kv_head) * PAGE + n % PAGE) * D
        both = real[:, None] & (d < D)[None, :]
        k = tl.load(base + k_at + cell[:, None] + d[None, :], both, other=0.0)
        v = tl.load(base + v_at + cell[:, None] + d[None, :], both, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scaling * log2e)
        score = tl.where(real[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(score - new_top[:, None])
        norm = norm * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(dtype), v, input_precision=PRECISION)
        top = new_top
    safe = tl.where(norm > 0, norm, 1.0)
    acc = acc / safe[:, None]
    if SPLITS == 1:
        out = out_ptr + (row * KV * GROUP + head[:, None]) * D + d[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), q_real)
    else:
        at = (row * KV * GROUP + head) * SPLITS + split
        tl.store(out_ptr + at[:, None] * D + d[None, :], acc, q_real)
        lse = tl.where(norm > 0, top + tl.log2(safe), float("-inf"))
        tl.store(lse_ptr + at, lse, g < GROUP)


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    part_ptr,
    lse_ptr,
    out_ptr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, D_PAD)
    lse = tl.load(lse_ptr + head * SPLITS + s)
    weight = tl.exp2(lse - tl.max(lse, 0))
    weight = weight / tl.sum(weight, 0)
    real = (d < D)[None, :]
    part = tl.load(
        part_ptr + (head * SPLITS + s)[:, None] * D + d[None, :],
        real & (weight > 0)[:, None],
        other=0.0,
    )
    out = tl.sum(part * weight[:, None], 0)
    tl.store(out_ptr + head * D + d, out.to(out_ptr.dtype.element_ty), d < D)


def decode_attention(
    q: Tensor,
    cache: PagedCache,
    layer: int,
    table: Tensor,
    positions: Tensor,
    *,
    scaling: float,
    window: int | None,
    splits: int,
) -> Tensor:
    rows, heads, d = q.shape
    kv = cache.kv_heads
    group = heads // kv
    padded = max(16, triton.next_power_of_2(d))  # the least a matrix product takes
    out = torch.empty(rows, heads, d, dtype=q.dtype, device=q.device)
    lse = part = out
    if splits > 1:
        part = torch.empty(rows, heads, splits, d, dtype=torch.float32, device=q.device)
        lse = torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device)
    k_at, v_at = cache.planes(layer)
    _decode_attention[(rows, kv, splits)](
        q, cache.base, table, positions, part, lse, k_at, v_at, scaling, table.stride(0),
        window if window is not None else 0, q.stride(0), q.stride(1),
        KV=kv, GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), D=d, D_PAD=padded,
        PAGE=cache.page_size, SPLITS=splits, WINDOWED=window is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **(_NARROW if padded <= 64 else _WIDE),
    )  # fmt: skip
    if splits > 1:
        _combine[(rows * heads,)](part, lse, out, D=d, D_PAD=padded, SPLITS=splits, num_warps=1)
    return out
