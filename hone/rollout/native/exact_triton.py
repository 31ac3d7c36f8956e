"""Batch-invariant GPU kernels of exact mode: matrix product and attention.

No sum is split over programs, and every row is summed in the same order: by feature in a product,
by key position in attention. Norm, gate, rotation and sampling use the kernels of other modules,
which compute row by row. The reference is exact_reference.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.ops.training_triton import add_rms_norm as add_rms_norm
from hone.rollout.native import kernels_triton
from hone.rollout.native.kernels_triton import advance as advance
from hone.rollout.native.kernels_triton import rope_store as rope_store
from hone.rollout.native.kernels_triton import silu_mul as silu_mul
from hone.rollout.native.kernels_triton import token_log_probs as token_log_probs
from hone.rollout.native.paged_layouts import TILE_ROWS

if TYPE_CHECKING:
    from hone.rollout.native.paged_cache import PagedCache
    from hone.rollout.native.paged_layouts import Queries

sample = partial(kernels_triton.sample, exact=True)

SMALL_TILE: dict[str, int] = {"BM": 64, "BN": 64, "BK": 128, "num_warps": 4, "num_stages": 4}
LARGE_TILE: dict[str, int] = {"BM": 128, "BN": 128, "BK": 64, "num_warps": 4, "num_stages": 3}
FLOAT32_TILE: dict[str, int] = {"BM": 64, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 2}
"""Tiles for few rows, for many rows, and for float32. The first two sum a row in the same order, 16
features per instruction, so the choice between them may depend on the batch."""
_FULL_GPU_PROGRAMS = 128
"""Number of programs that occupy a large GPU."""
_KEYS_PER_ITERATION = 64


@triton.jit
def _linear(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, out_features, in_features,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # Groups of eight tile rows reuse weight columns from the L2 cache.
    pid = tl.program_id(0)
    num_pid_m = tl.cdiv(rows, BM)
    num_pid_n = tl.cdiv(out_features, BN)
    group_id = pid // (8 * num_pid_n)
    group_size_m = tl.minimum(num_pid_m - group_id * 8, 8)
    pid_in_group = pid % (8 * num_pid_n)
    m = (group_id * 8 + pid_in_group % group_size_m) * BM + tl.arange(0, BM)
    n = (pid_in_group // group_size_m) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x = x_ptr + (m % rows).to(tl.int64)[:, None] * in_features + k[None, :]
    w = weight_ptr + (n % out_features).to(tl.int64)[None, :] * in_features + k[:, None]
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, in_features, BK):
        if EVEN_K:
            a = tl.load(x)
            b = tl.load(w)
        else:
            a = tl.load(x, (k < in_features - start)[None, :], other=0.0)
            b = tl.load(w, (k < in_features - start)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        x += BK
        w += BK
    if BIAS:
        acc += tl.load(bias_ptr + n, n < out_features, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + m.to(tl.int64)[:, None] * out_features + n[None, :]
    mask = (m < rows)[:, None] & (n < out_features)[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask)


def linear(
    x: Tensor,  # [M, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None,
    *,
    float32_out: bool = False,
    tile: dict[str, int] | None = None,
) -> Tensor:
    """Returns x Wᵀ + bias in the dtype of x, or in float32 if `float32_out`."""
    x, weight = x.contiguous(), weight.detach()
    (rows, in_features), out_features = x.shape, len(weight)
    out = torch.empty(
        rows, out_features, dtype=torch.float32 if float32_out else x.dtype, device=x.device
    )
    if rows == 0:
        return out
    tile = tile or _choose_tile(x, out_features)
    _linear[(triton.cdiv(rows, tile["BM"]) * triton.cdiv(out_features, tile["BN"]),)](
        x, weight, bias.detach() if bias is not None else weight, out, rows, out_features,
        in_features, BIAS=bias is not None, EVEN_K=in_features % tile["BK"] == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", **tile,
    )  # fmt: skip
    return out


def _choose_tile(x: Tensor, out_features: int) -> dict[str, int]:
    if x.dtype == torch.float32:
        return FLOAT32_TILE
    programs = triton.cdiv(len(x), LARGE_TILE["BM"]) * triton.cdiv(out_features, LARGE_TILE["BN"])
    return (
        LARGE_TILE if programs >= _FULL_GPU_PROGRAMS and len(x) > SMALL_TILE["BM"] else SMALL_TILE
    )


@triton.jit(do_not_specialize=["k_offset", "v_offset", "table_stride"])
def _attention(  # type: ignore[no-untyped-def]
    q_ptr, base_ptr, k_offset: tl.int64, v_offset: tl.int64, table_ptr, table_stride,
    first_query_ptr, num_queries_ptr, first_position_ptr, row_ptr, out_ptr, scaling,
    KV: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes one tile: consecutive queries of a sequence, and all query heads of one key head."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    dtype = q_ptr.dtype.element_ty
    num_queries = tl.load(num_queries_ptr + tile).to(tl.int32)
    first_position = tl.load(first_position_ptr + tile).to(tl.int32)
    row = tl.load(row_ptr + tile)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, D_PAD)
    query = r // GROUP_PAD
    g = r % GROUP_PAD
    d_mask = (d < D)[None, :]
    mask = ((query < num_queries) & (g < GROUP))[:, None] & d_mask
    row_offset = (tl.load(first_query_ptr + tile) + query) * (KV * GROUP) + kv_head * GROUP + g
    row_offset = row_offset[:, None] * D + d[None, :]
    q = tl.load(q_ptr + row_offset, mask, other=0.0)
    base = tl.multiple_of(tl.load(base_ptr).to(tl.pointer_type(dtype)), 16)
    last_visible = first_position + query
    end = first_position + num_queries
    max_score = tl.full([ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    log2e: tl.constexpr = 1.4426950408889634
    for start in range(0, end, KEYS):
        n = start + tl.arange(0, KEYS)
        key_mask = n < end
        block = tl.load(table_ptr + row * table_stride + n // BLOCK_SIZE, key_mask, other=0).to(
            tl.int64
        )
        slot_offset = (((block * KV + kv_head) * BLOCK_SIZE + n % BLOCK_SIZE) * D)[:, None] + d[
            None, :
        ]
        k = tl.load(base + k_offset + slot_offset, key_mask[:, None] & d_mask, other=0.0)
        v = tl.load(base + v_offset + slot_offset, key_mask[:, None] & d_mask, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scaling * log2e)
        # A masked key adds exactly 0, so a row does not depend on the other rows of its tile.
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
    k_offset, v_offset = cache.kv_offsets(layer)
    _attention[(len(tiles.first_query), kv)](
        q, cache.base_address, k_offset, v_offset, queries.block_table,
        queries.block_table.stride(0), tiles.first_query, tiles.num_queries, tiles.first_position,
        tiles.row, out, scaling,
        KV=kv, GROUP=group, GROUP_PAD=triton.next_power_of_2(group), D=d,
        D_PAD=max(16, triton.next_power_of_2(d)), BLOCK_SIZE=cache.block_size,
        KEYS=_KEYS_PER_ITERATION, ROWS=TILE_ROWS,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
