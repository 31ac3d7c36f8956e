"""Paged decode attention on a GPU: one query per sequence attends over its block table and its own key.

This module is imported only on a GPU; the references are in kernels_reference.py. Key tiles start at
multiples of KEYS and are read from last to first, as in torch's variable-length kernel, which training
uses: weights are rounded relative to the running maximum score, so the same order gives the same rounding.
For head dimensions up to 64 that kernel reads 128 keys per tile, which is slower here; the first tile of
a sequence is then rounded differently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from hone.ops.attention import AttentionOptions
    from hone.rollout.native.kernels_reference import RotaryTable
    from hone.rollout.native.paged_cache import PagedCache

_NARROW = {"KEYS": 64, "num_warps": 2, "num_stages": 3}
_WIDE = {"KEYS": 64, "num_warps": 4, "num_stages": 3}
"""Keys per loop iteration and launch options, for head dimensions up to 64 and above."""


@triton.jit
def _share_of_tiles(  # type: ignore[no-untyped-def]
    length, window, split, KEYS: tl.constexpr, SPLITS: tl.constexpr, WINDOWED: tl.constexpr
):
    """Returns the first visible key, this program's key tiles [begin, end), and the number of tiles."""
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window, 0)
    lowest = first // KEYS
    tiles = tl.cdiv(length, KEYS)
    share = tl.cdiv(tiles - lowest, SPLITS)
    begin = lowest + split * share
    return first, begin, tl.minimum(begin + share, tiles), tiles


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, base, blocks_ptr, kv_head, k_at, v_at, scaling, length, first, begin, end, softcap, sink,
    KV: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Returns the maximum score, the sum of weights and the weighted mean of values of tiles [begin, end).

    q is [GROUP_PAD, D_PAD]; sink is [GROUP_PAD], -inf for heads without a sink.
    """
    d = tl.arange(0, D_PAD)
    log2e: tl.constexpr = 1.4426950408889634
    if SINKS:
        top = sink * log2e
        norm = tl.where(sink > float("-inf"), 1.0, 0.0)
    else:
        top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        norm = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
    for done in range(end - begin):
        n = (end - 1 - done) * KEYS + tl.arange(0, KEYS)
        real = (n >= first) & (n < length)
        block = tl.load(blocks_ptr + n // BLOCK_SIZE, real, other=0).to(tl.int64)
        cell = ((block * KV + kv_head) * BLOCK_SIZE + n % BLOCK_SIZE) * D
        both = real[:, None] & (d < D)[None, :]
        k = tl.load(base + k_at + cell[:, None] + d[None, :], both, other=0.0)
        v = tl.load(base + v_at + cell[:, None] + d[None, :], both, other=0.0)
        if SOFTCAP:
            score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scaling / softcap)
            score = (2 * tl.sigmoid(2 * score) - 1) * (softcap * log2e)  # tanh
        else:
            score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scaling * log2e)
        score = tl.where(real[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(score - new_top[:, None])
        norm = norm * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(q.dtype), v, input_precision=PRECISION)
        top = new_top
    return top, norm, acc / tl.where(norm > 0, norm, 1.0)[:, None]


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    out_ptr, lse_ptr, head, split, top, norm, acc,
    GROUP: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    g = tl.arange(0, acc.shape[0])
    d = tl.arange(0, acc.shape[1])
    real = (g < GROUP)[:, None] & (d < D)[None, :]
    at = head + g
    if SPLITS > 1:
        at = at * SPLITS + split
        lse = tl.where(norm > 0, top + tl.log2(tl.where(norm > 0, norm, 1.0)), float("-inf"))
        tl.store(lse_ptr + at, lse, g < GROUP)
    tl.store(out_ptr + at[:, None] * D + d[None, :], acc.to(out_ptr.dtype.element_ty), real)


@triton.jit
def _decode_attention(  # type: ignore[no-untyped-def]
    q_ptr, base_ptr, table_ptr, position_ptr, out_ptr, lse_ptr, k_at: tl.int64, v_at: tl.int64,
    scaling, table_stride, window, q_stride, q_head_stride, softcap, sink_ptr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, SPLITS: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = (tl.load(position_ptr + row) + 1).to(tl.int32)
    first, begin, end, _ = _share_of_tiles(length, window, split, KEYS, SPLITS, WINDOWED)
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, D_PAD)
    start = q_ptr + row * q_stride + (kv_head * GROUP + g)[:, None] * q_head_stride
    q = tl.load(start + d[None, :], (g < GROUP)[:, None] & (d < D)[None, :], other=0.0)
    base = tl.multiple_of(tl.load(base_ptr).to(tl.pointer_type(q_ptr.dtype.element_ty)), 16)
    sink = 0.0
    if SINKS:
        sink = tl.load(sink_ptr + kv_head * GROUP + g, g < GROUP, other=float("-inf"))
        sink = tl.where(split == 0, sink.to(tl.float32), float("-inf"))  # only split 0 adds it
    top, norm, acc = _attend(
        q, base, table_ptr + row * table_stride, kv_head, k_at, v_at, scaling, length, first,
        begin, end, softcap, sink, KV, GROUP_PAD, D, D_PAD, BLOCK_SIZE, KEYS, PRECISION, SOFTCAP, SINKS,
    )  # fmt: skip
    head = (row * KV + kv_head) * GROUP
    _write(out_ptr, lse_ptr, head, split, top, norm, acc, GROUP, D, SPLITS)


@triton.jit
def _rotated_heads(  # type: ignore[no-untyped-def]
    x_ptr, real, cos, sin, norm_ptr, eps, D: tl.constexpr, D_PAD: tl.constexpr, NORM: tl.constexpr
):
    """Loads heads at x_ptr ([h, 1] or one pointer), norms them if NORM, rotates them: [h, D_PAD]."""
    d = tl.arange(0, D_PAD)[None, :]
    low = d < D // 2
    partner = tl.where(low, d + D // 2, d - D // 2)
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + d, real, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + partner, real, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        weight = tl.load(norm_ptr + d, d < D, other=0.0).to(tl.float32)
        x = (x * scale * weight).to(dtype).to(tl.float32)
        weight = tl.load(norm_ptr + partner, d < D, other=0.0).to(tl.float32)
        y = (y * scale * weight).to(dtype).to(tl.float32)
    return tl.where(low, x * cos - y * sin, x * cos + y * sin).to(dtype)


@triton.jit
def _rope_attention(  # type: ignore[no-untyped-def]
    qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps, slot_ptr, base_ptr, table_ptr,
    position_ptr, out_ptr, lse_ptr, k_at: tl.int64, v_at: tl.int64, scaling, table_stride, window,
    NORM: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    position, slot = tl.load(position_ptr + row), tl.load(slot_ptr + row)
    length = (position + 1).to(tl.int32)
    first, begin, end, tiles = _share_of_tiles(length, window, split, KEYS, SPLITS, WINDOWED)
    d = tl.arange(0, D_PAD)[None, :]
    inside = d < D
    cos = tl.load(cos_ptr + position * D + d, inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * D + d, inside, other=0.0).to(tl.float32)
    base = tl.multiple_of(tl.load(base_ptr).to(tl.pointer_type(qkv_ptr.dtype.element_ty)), 16)
    line = qkv_ptr + row * ((KV * GROUP + 2 * KV) * D)
    # The program of the last tile writes the new key and value before it reads the tile.
    newest = inside & (begin < tiles) & (end == tiles)
    k_ptr = line + (KV * GROUP + kv_head) * D
    k = _rotated_heads(k_ptr, newest, cos, sin, k_norm_ptr, eps, D, D_PAD, NORM)
    v = tl.load(k_ptr + KV * D + d, newest, other=0.0)
    cell = (((slot // BLOCK_SIZE) * KV + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE) * D
    tl.store(base + k_at + cell + d, k, newest)
    tl.store(base + v_at + cell + d, v, newest)
    g = tl.arange(0, GROUP_PAD)[:, None]
    heads = line + (kv_head * GROUP + g) * D
    q = _rotated_heads(heads, inside & (g < GROUP), cos, sin, q_norm_ptr, eps, D, D_PAD, NORM)
    tl.debug_barrier()
    top, norm, acc = _attend(
        q, base, table_ptr + row * table_stride, kv_head, k_at, v_at, scaling, length, first,
        begin, end, 0.0, 0.0, KV, GROUP_PAD, D, D_PAD, BLOCK_SIZE, KEYS, PRECISION, False, False,
    )  # fmt: skip
    head = (row * KV + kv_head) * GROUP
    _write(out_ptr, lse_ptr, head, split, top, norm, acc, GROUP, D, SPLITS)


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    part_ptr, lse_ptr, out_ptr,
    D: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
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


class _Launch:
    """The launch arguments and outputs that both kernels share."""

    def __init__(
        self, like: Tensor, heads: int, cache: PagedCache, window: int | None, splits: int
    ) -> None:
        rows, kv, d = like.shape[0], cache.kv_heads, cache.head_dim
        self.grid = (rows, kv, splits)
        self._padded = max(16, triton.next_power_of_2(d))  # the minimum of tl.dot
        self.out = self.part = self.lse = like.new_empty(rows, heads, d)
        if splits > 1:
            self.part = like.new_empty(rows, heads, splits, d, dtype=torch.float32)
            self.lse = like.new_empty(rows, heads, splits, dtype=torch.float32)
        group = heads // kv
        self.constants: dict[str, int | str] = {
            "KV": kv,
            "GROUP": group,
            "GROUP_PAD": max(16, triton.next_power_of_2(group)),
            "D": d,
            "D_PAD": self._padded,
            "BLOCK_SIZE": cache.block_size,
            "SPLITS": splits,
            "WINDOWED": window is not None,
            "PRECISION": "ieee" if like.dtype == torch.float32 else "tf32",
            **(_NARROW if self._padded <= 64 else _WIDE),
        }

    def combined(self) -> Tensor:
        """Returns the output, combined over all splits."""
        rows, heads, d = self.out.shape
        if self.part is not self.out:
            _combine[(rows * heads,)](
                self.part, self.lse, self.out, D=d, D_PAD=self._padded, SPLITS=self.grid[2],
                num_warps=1,
            )  # fmt: skip
        return self.out


def decode_attention(
    q: Tensor,
    cache: PagedCache,
    block_table: Tensor,
    positions: Tensor,
    options: AttentionOptions,
    *,
    splits: int,
) -> Tensor:
    layer, scaling, window, softcap, sinks = options
    launch = _Launch(q, q.shape[1], cache, window, splits)
    _decode_attention[launch.grid](
        q, cache.base, block_table, positions, launch.part, launch.lse, *cache.plane_offsets(layer),
        scaling, block_table.stride(0), window or 0, q.stride(0), q.stride(1), softcap or 0.0,
        sinks if sinks is not None else q, SOFTCAP=softcap is not None, SINKS=sinks is not None,
        **launch.constants,
    )  # fmt: skip
    return launch.combined()


def rope_attention(
    qkv: Tensor,
    rotary: RotaryTable,
    positions: Tensor,
    slots: Tensor,
    cache: PagedCache,
    block_table: Tensor,
    options: AttentionOptions,
    *,
    splits: int,
) -> Tensor:
    heads = qkv.shape[1] // cache.head_dim - 2 * cache.kv_heads
    launch = _Launch(qkv, heads, cache, options.window, splits)
    _rope_attention[launch.grid](
        qkv, rotary.cos, rotary.sin, rotary.q_norm if rotary.q_norm is not None else qkv,
        rotary.k_norm if rotary.k_norm is not None else qkv, rotary.eps, slots, cache.base,
        block_table, positions, launch.part, launch.lse, *cache.plane_offsets(options.layer),
        options.scaling, block_table.stride(0), options.window or 0,
        NORM=rotary.q_norm is not None, **launch.constants,
    )  # fmt: skip
    return launch.combined()
