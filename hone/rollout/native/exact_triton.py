"""Batch-invariant GPU kernels of exact mode: matrix product and attention.

No sum is split over programs, and every row is summed in the same order: by feature in a product, by key
position in attention. Norm, gate, rotation and sampling use the other kernels, which compute row by row.
The reference is exact_reference.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.ops.rms_norm_triton import add_rms_norm as add_rms_norm
from hone.rollout.native import sampling_triton
from hone.rollout.native.exact_layouts import TILE_ROWS
from hone.rollout.native.kernels_triton import rope_store as rope_store
from hone.rollout.native.kernels_triton import silu_mul as silu_mul

if TYPE_CHECKING:
    from hone.rollout.native.exact_layouts import Queries
    from hone.rollout.native.paged_cache import PagedCache

sample = partial(sampling_triton.sample, exact=True)
advance, log_probs_of = sampling_triton.advance, sampling_triton.log_probs_of

SMALL_TILE: dict[str, int] = {"BM": 64, "BN": 64, "BK": 128, "num_warps": 4, "num_stages": 4}
LARGE_TILE: dict[str, int] = {"BM": 128, "BN": 128, "BK": 64, "num_warps": 4, "num_stages": 3}
FLOAT32_TILE: dict[str, int] = {"BM": 64, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 2}
"""Tiles for few rows, for many rows, and for float32. The first two sum a row in the same order, 16 features
per instruction, so the choice between them may depend on the batch."""
_FULL_GPU_PROGRAMS = 128
"""Number of programs that occupy a large GPU."""
_KEYS_PER_STEP = 64


@triton.jit
def _linear(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, outputs, inputs,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # Groups of eight tile rows reuse weight columns from the L2 cache.
    pid = tl.program_id(0)
    num_pid_m = tl.cdiv(rows, BM)
    num_pid_n = tl.cdiv(outputs, BN)
    group_id = pid // (8 * num_pid_n)
    group_size_m = tl.minimum(num_pid_m - group_id * 8, 8)
    pid_in_group = pid % (8 * num_pid_n)
    m = (group_id * 8 + pid_in_group % group_size_m) * BM + tl.arange(0, BM)
    n = (pid_in_group // group_size_m) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x = x_ptr + (m % rows).to(tl.int64)[:, None] * inputs + k[None, :]
    w = weight_ptr + (n % outputs).to(tl.int64)[None, :] * inputs + k[:, None]
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, inputs, BK):
        if EVEN:
            a = tl.load(x)
            b = tl.load(w)
        else:
            a = tl.load(x, (k < inputs - start)[None, :], other=0.0)
            b = tl.load(w, (k < inputs - start)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        x += BK
        w += BK
    if BIAS:
        acc += tl.load(bias_ptr + n, n < outputs, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + m.to(tl.int64)[:, None] * outputs + n[None, :]
    mask = (m < rows)[:, None] & (n < outputs)[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask)


def linear(
    x: Tensor,  # [M, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None,
    *,
    float32_out: bool = False,
    tile: dict[str, int] | None = None,
) -> Tensor:
    """Returns x Wᵀ + bias in the weight's dtype, or in float32 if `float32_out`."""
    x, weight = x.contiguous(), weight.detach()
    (rows, inputs), outputs = x.shape, len(weight)
    out = torch.empty(
        rows, outputs, dtype=torch.float32 if float32_out else x.dtype, device=x.device
    )
    if rows == 0:
        return out
    tile = tile or _choose_tile(x, outputs)
    _linear[(triton.cdiv(rows, tile["BM"]) * triton.cdiv(outputs, tile["BN"]),)](
        x, weight, bias.detach() if bias is not None else weight, out, rows, outputs, inputs,
        BIAS=bias is not None, EVEN=inputs % tile["BK"] == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", **tile,
    )  # fmt: skip
    return out


def _choose_tile(x: Tensor, outputs: int) -> dict[str, int]:
    if x.dtype == torch.float32:
        return FLOAT32_TILE
    programs = triton.cdiv(len(x), LARGE_TILE["BM"]) * triton.cdiv(outputs, LARGE_TILE["BN"])
    return (
        LARGE_TILE if programs >= _FULL_GPU_PROGRAMS and len(x) > SMALL_TILE["BM"] else SMALL_TILE
    )


@triton.jit(do_not_specialize=["k_offset", "v_offset", "table_stride"])
def _attention(  # type: ignore[no-untyped-def]
    q_ptr, base_ptr, k_offset: tl.int64, v_offset: tl.int64, table_ptr, table_stride, token_ptr,
    count_ptr, position_ptr, row_ptr, out_ptr, scaling,
    KV: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes a tile of consecutive queries of one sequence: query × head pairs of one key head."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    dtype = q_ptr.dtype.element_ty
    count = tl.load(count_ptr + tile).to(tl.int32)
    position = tl.load(position_ptr + tile).to(tl.int32)
    row = tl.load(row_ptr + tile)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, D_PAD)
    query = r // GROUP_PAD
    g = r % GROUP_PAD
    d_mask = (d < D)[None, :]
    mask = ((query < count) & (g < GROUP))[:, None] & d_mask
    row_offset = (tl.load(token_ptr + tile) + query) * (KV * GROUP) + kv_head * GROUP + g
    row_offset = row_offset[:, None] * D + d[None, :]
    q = tl.load(q_ptr + row_offset, mask, other=0.0)
    base = tl.multiple_of(tl.load(base_ptr).to(tl.pointer_type(dtype)), 16)
    last_visible = position + query
    end = position + count
    max_score = tl.full([ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    log2e: tl.constexpr = 1.4426950408889634
    for start in range(0, end, KEYS):
        n = start + tl.arange(0, KEYS)
        in_range = n < end
        block = tl.load(table_ptr + row * table_stride + n // BLOCK_SIZE, in_range, other=0).to(
            tl.int64
        )
        kv_offset = (((block * KV + kv_head) * BLOCK_SIZE + n % BLOCK_SIZE) * D)[:, None] + d[
            None, :
        ]
        k = tl.load(base + k_offset + kv_offset, in_range[:, None] & d_mask, other=0.0)
        v = tl.load(base + v_offset + kv_offset, in_range[:, None] & d_mask, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scaling * log2e)
        # A masked key adds exact zeros, so the other rows of the tile change no bit.
        score = tl.where(n[None, :] <= last_visible[:, None], score, float("-inf"))
        new_max_score = tl.maximum(max_score, tl.max(score, 1))
        rescale = tl.exp2(max_score - new_max_score)
        p = tl.exp2(score - new_max_score[:, None])
        weight_sum = weight_sum * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None] + tl.dot(p.to(dtype), v, input_precision=PRECISION)
        max_score = new_max_score
    tl.store(out_ptr + row_offset, (acc / weight_sum[:, None]).to(dtype), mask)


def query_attention(
    q: Tensor,  # [N, H, D]
    cache: PagedCache,
    layer: int,
    queries: Queries,
    *,
    scaling: float,
) -> Tensor:
    tiles = queries.tiles
    assert tiles is not None
    _, heads, d = q.shape
    kv = cache.kv_heads
    group = heads // kv
    out = torch.empty_like(q)
    k_offset, v_offset = cache.plane_offsets(layer)
    _attention[(len(tiles.token), kv)](
        q, cache.base, k_offset, v_offset, queries.block_table, queries.block_table.stride(0),
        tiles.token, tiles.count, tiles.position, tiles.row, out, scaling,
        KV=kv, GROUP=group, GROUP_PAD=triton.next_power_of_2(group), D=d,
        D_PAD=max(16, triton.next_power_of_2(d)), BLOCK_SIZE=cache.block_size, KEYS=_KEYS_PER_STEP,
        ROWS=TILE_ROWS,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
