"""Paged decode attention on a GPU: one query per sequence attends over its block table.

This module is imported only on a GPU; the references are in kernels_reference.py. Key tiles start
at multiples of KEYS and are read from last to first, as in torch's variable-length kernel, which
training uses. Softmax terms are rounded relative to the running maximum score, so the same order
gives the same rounding. For head dimensions up to 64, torch's kernel reads tiles of 128 keys. This kernel
reads tiles of 64 keys, which is faster here, so it rounds the first tile of a sequence differently from
torch.
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

_KEYS_PER_TILE = 64


@triton.jit
def _tiles_of_split(  # type: ignore[no-untyped-def]
    length, window, split, KEYS: tl.constexpr, SPLITS: tl.constexpr, WINDOWED: tl.constexpr
):
    """Returns the first visible key, a split's key tiles [begin, end), and the number of tiles."""
    first_key = 0
    if WINDOWED:
        first_key = tl.maximum(length - window, 0)
    first_tile = first_key // KEYS
    num_tiles = tl.cdiv(length, KEYS)
    tiles_per_split = tl.cdiv(num_tiles - first_tile, SPLITS)
    begin = first_tile + split * tiles_per_split
    return first_key, begin, tl.minimum(begin + tiles_per_split, num_tiles), num_tiles


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, base, blocks_ptr, kv_head, k_offset, v_offset, scaling, length, first_key, begin, end,
    softcap, sink, KV: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Returns maximum score, sum of weights, weighted mean of values over key tiles [begin, end).

    q is [GROUP_PAD, D_PAD]; sink is [GROUP_PAD], -inf for heads without a sink.
    """
    d = tl.arange(0, D_PAD)
    log2e: tl.constexpr = 1.4426950408889634
    if SINKS:
        max_score = sink * log2e
        weight_sum = tl.where(sink > float("-inf"), 1.0, 0.0)
    else:
        max_score = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        weight_sum = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
    for i in range(end - begin):
        n = (end - 1 - i) * KEYS + tl.arange(0, KEYS)
        mask = (n >= first_key) & (n < length)
        block = tl.load(blocks_ptr + n // BLOCK_SIZE, mask, other=0).to(tl.int64)
        slot_offset = ((block * KV + kv_head) * BLOCK_SIZE + n % BLOCK_SIZE) * D
        kv_mask = mask[:, None] & (d < D)[None, :]
        k = tl.load(base + k_offset + slot_offset[:, None] + d[None, :], kv_mask, other=0.0)
        v = tl.load(base + v_offset + slot_offset[:, None] + d[None, :], kv_mask, other=0.0)
        if SOFTCAP:
            score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scaling / softcap)
            score = (2 * tl.sigmoid(2 * score) - 1) * (softcap * log2e)  # tanh
        else:
            score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scaling * log2e)
        score = tl.where(mask[None, :], score, float("-inf"))
        new_max_score = tl.maximum(max_score, tl.max(score, 1))
        rescale = tl.exp2(max_score - new_max_score)
        p = tl.exp2(score - new_max_score[:, None])
        weight_sum = weight_sum * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None] + tl.dot(p.to(q.dtype), v, input_precision=PRECISION)
        max_score = new_max_score
    return max_score, weight_sum, acc / tl.where(weight_sum > 0, weight_sum, 1.0)[:, None]


@triton.jit
def _store_output(  # type: ignore[no-untyped-def]
    out_ptr, lse_ptr, first_head, split, max_score, weight_sum, acc,
    GROUP: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    g = tl.arange(0, acc.shape[0])
    d = tl.arange(0, acc.shape[1])
    mask = (g < GROUP)[:, None] & (d < D)[None, :]
    row_offset = first_head + g
    if SPLITS > 1:
        row_offset = row_offset * SPLITS + split
        log_sum = tl.log2(tl.where(weight_sum > 0, weight_sum, 1.0))
        lse = tl.where(weight_sum > 0, max_score + log_sum, float("-inf"))
        tl.store(lse_ptr + row_offset, lse, g < GROUP)
    tl.store(out_ptr + row_offset[:, None] * D + d[None, :], acc.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _decode_attention(  # type: ignore[no-untyped-def]
    q_ptr, base_ptr, table_ptr, position_ptr, out_ptr, lse_ptr, k_offset: tl.int64,
    v_offset: tl.int64, scaling, table_stride, window, q_stride, q_head_stride, softcap, sink_ptr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, SPLITS: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = (tl.load(position_ptr + row) + 1).to(tl.int32)
    first_key, begin, end, _ = _tiles_of_split(length, window, split, KEYS, SPLITS, WINDOWED)
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, D_PAD)
    q_row_ptr = q_ptr + row * q_stride + (kv_head * GROUP + g)[:, None] * q_head_stride
    q = tl.load(q_row_ptr + d[None, :], (g < GROUP)[:, None] & (d < D)[None, :], other=0.0)
    base = tl.multiple_of(tl.load(base_ptr).to(tl.pointer_type(q_ptr.dtype.element_ty)), 16)
    sink = 0.0
    if SINKS:
        sink = tl.load(sink_ptr + kv_head * GROUP + g, g < GROUP, other=float("-inf"))
        # Only split 0 adds the sink.
        sink = tl.where(split == 0, sink.to(tl.float32), float("-inf"))
    max_score, weight_sum, acc = _attend(
        q, base, table_ptr + row * table_stride, kv_head, k_offset, v_offset, scaling, length,
        first_key, begin, end, softcap, sink, KV, GROUP_PAD, D, D_PAD, BLOCK_SIZE, KEYS, PRECISION,
        SOFTCAP, SINKS,
    )  # fmt: skip
    first_head = (row * KV + kv_head) * GROUP
    _store_output(out_ptr, lse_ptr, first_head, split, max_score, weight_sum, acc, GROUP, D, SPLITS)


@triton.jit
def _load_rotated_heads(  # type: ignore[no-untyped-def]
    x_ptr, mask, cos, sin, norm_ptr, eps, D: tl.constexpr, D_PAD: tl.constexpr, NORM: tl.constexpr
):
    """Loads heads from x_ptr ([heads, 1] or one pointer), applies the norm if NORM, and returns the
    rotated heads, [heads, D_PAD]."""
    d = tl.arange(0, D_PAD)[None, :]
    is_first_half = d < D // 2
    partner_index = tl.where(is_first_half, d + D // 2, d - D // 2)
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + d, mask, other=0.0).to(tl.float32)
    x_partner = tl.load(x_ptr + partner_index, mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        weight = tl.load(norm_ptr + d, d < D, other=0.0).to(tl.float32)
        x = (x * scale * weight).to(dtype).to(tl.float32)
        weight = tl.load(norm_ptr + partner_index, d < D, other=0.0).to(tl.float32)
        x_partner = (x_partner * scale * weight).to(dtype).to(tl.float32)
    return tl.where(is_first_half, x * cos - x_partner * sin, x * cos + x_partner * sin).to(dtype)


@triton.jit
def _rope_attention(  # type: ignore[no-untyped-def]
    qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps, slot_ptr, base_ptr, table_ptr,
    position_ptr, out_ptr, lse_ptr, k_offset: tl.int64, v_offset: tl.int64, scaling, table_stride,
    window,
    NORM: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    position, slot = tl.load(position_ptr + row), tl.load(slot_ptr + row)
    length = (position + 1).to(tl.int32)
    first_key, begin, end, num_tiles = _tiles_of_split(
        length, window, split, KEYS, SPLITS, WINDOWED
    )
    d = tl.arange(0, D_PAD)[None, :]
    d_mask = d < D
    cos = tl.load(cos_ptr + position * D + d, d_mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * D + d, d_mask, other=0.0).to(tl.float32)
    base = tl.multiple_of(tl.load(base_ptr).to(tl.pointer_type(qkv_ptr.dtype.element_ty)), 16)
    qkv_row = qkv_ptr + row * ((KV * GROUP + 2 * KV) * D)
    # The program of the last tile writes the new key and value before it reads the tile.
    new_kv_mask = d_mask & (begin < num_tiles) & (end == num_tiles)
    k_ptr = qkv_row + (KV * GROUP + kv_head) * D
    k = _load_rotated_heads(k_ptr, new_kv_mask, cos, sin, k_norm_ptr, eps, D, D_PAD, NORM)
    v = tl.load(k_ptr + KV * D + d, new_kv_mask, other=0.0)
    slot_offset = (((slot // BLOCK_SIZE) * KV + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE) * D
    tl.store(base + k_offset + slot_offset + d, k, new_kv_mask)
    tl.store(base + v_offset + slot_offset + d, v, new_kv_mask)
    g = tl.arange(0, GROUP_PAD)[:, None]
    q_row_ptr = qkv_row + (kv_head * GROUP + g) * D
    q = _load_rotated_heads(
        q_row_ptr, d_mask & (g < GROUP), cos, sin, q_norm_ptr, eps, D, D_PAD, NORM
    )
    tl.debug_barrier()
    max_score, weight_sum, acc = _attend(
        q, base, table_ptr + row * table_stride, kv_head, k_offset, v_offset, scaling, length,
        first_key, begin, end, 0.0, 0.0, KV, GROUP_PAD, D, D_PAD, BLOCK_SIZE, KEYS, PRECISION,
        False, False,
    )  # fmt: skip
    first_head = (row * KV + kv_head) * GROUP
    _store_output(out_ptr, lse_ptr, first_head, split, max_score, weight_sum, acc, GROUP, D, SPLITS)


@triton.jit
def _combine_splits(  # type: ignore[no-untyped-def]
    partial_out_ptr, lse_ptr, out_ptr,
    D: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, D_PAD)
    lse = tl.load(lse_ptr + head * SPLITS + s)
    weight = tl.exp2(lse - tl.max(lse, 0))
    weight = weight / tl.sum(weight, 0)
    mask = (d < D)[None, :]
    partial_out = tl.load(
        partial_out_ptr + (head * SPLITS + s)[:, None] * D + d[None, :],
        mask & (weight > 0)[:, None],
        other=0.0,
    )
    out = tl.sum(partial_out * weight[:, None], 0)
    tl.store(out_ptr + head * D + d, out.to(out_ptr.dtype.element_ty), d < D)


class _Launch:
    """The grid, constants and output tensors of a launch of one of the two attention kernels."""

    def __init__(
        self, inputs: Tensor, heads: int, cache: PagedCache, window: int | None, splits: int
    ) -> None:
        rows, kv, d = inputs.shape[0], cache.kv_heads, cache.head_dim
        self.grid = (rows, kv, splits)
        self._padded_dim = max(16, triton.next_power_of_2(d))  # tl.dot needs at least 16
        self.out = self.partial_out = self.lse = inputs.new_empty(rows, heads, d)
        if splits > 1:
            self.partial_out = inputs.new_empty(rows, heads, splits, d, dtype=torch.float32)
            self.lse = inputs.new_empty(rows, heads, splits, dtype=torch.float32)
        group = heads // kv
        self.constants: dict[str, int | str] = {
            "KV": kv,
            "GROUP": group,
            "GROUP_PAD": max(16, triton.next_power_of_2(group)),
            "D": d,
            "D_PAD": self._padded_dim,
            "BLOCK_SIZE": cache.block_size,
            "SPLITS": splits,
            "WINDOWED": window is not None,
            "PRECISION": "ieee" if inputs.dtype == torch.float32 else "tf32",
            "KEYS": _KEYS_PER_TILE,
            "num_warps": 2 if self._padded_dim <= 64 else 4,
            "num_stages": 3,
        }

    def combine(self) -> Tensor:
        """Combines the outputs of the splits and returns the attention output."""
        rows, heads, d = self.out.shape
        if self.partial_out is not self.out:
            _combine_splits[(rows * heads,)](
                self.partial_out, self.lse, self.out, D=d, D_PAD=self._padded_dim,
                SPLITS=self.grid[2], num_warps=1,
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
        q, cache.base_address, block_table, positions, launch.partial_out, launch.lse,
        *cache.kv_offsets(layer), scaling, block_table.stride(0), window or 0, q.stride(0),
        q.stride(1), softcap or 0.0, sinks if sinks is not None else q,
        SOFTCAP=softcap is not None, SINKS=sinks is not None, **launch.constants,
    )  # fmt: skip
    return launch.combine()


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
        rotary.k_norm if rotary.k_norm is not None else qkv, rotary.eps, slots, cache.base_address,
        block_table, positions, launch.partial_out, launch.lse, *cache.kv_offsets(options.layer),
        options.scaling, block_table.stride(0), options.window or 0,
        NORM=rotary.q_norm is not None, **launch.constants,
    )  # fmt: skip
    return launch.combine()
