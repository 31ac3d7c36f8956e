"""What the GPU kernels compute, in plain torch: the CPU lane runs it, the gpu lane compares with it.

Function for function the namesakes of kernels_triton.py, attention_triton.py and sampling_triton.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops.counter_rng import uniform
from hone.ops.scored_attention import cap, weigh

if TYPE_CHECKING:
    from hone.rollout.native.paged_cache import PagedCache
    from hone.rollout.native.paged_rows import RowState


class Turn(NamedTuple):
    """How a layer's queries and keys are rotated, and normed before it where the norms are given."""

    cos: Tensor  # [W, D]
    sin: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0


def add_rms_norm(
    x: Tensor,  # [N, d]
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The norm of `x + residual` in the weight's dtype, and that sum in float32."""
    total = x if residual is None else x.float() + residual
    normed = F.rms_norm(total.float(), weight.shape, weight.float(), eps)
    return normed.to(weight.dtype), total


def silu_mul(gate_up: Tensor) -> Tensor:  # [N, 2 F] -> [N, F]
    gate, up = gate_up.chunk(2, -1)
    return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)


def rope_store(
    qkv: Tensor,  # [N, (H + 2 KV) D]
    turn: Turn,
    positions: Tensor,  # [N]
    slots: Tensor,  # [N] page * page_size + offset
    cache: PagedCache,
    layer: int,
    *,
    keep_keys: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values; keys and values are in the cache afterwards."""
    kv, d = cache.kv_heads, cache.head_dim
    q, k, v = qkv.unflatten(1, (-1, d)).split([qkv.shape[1] // d - 2 * kv, kv, kv], 1)
    if turn.q_norm is not None and turn.k_norm is not None:
        q = F.rms_norm(q, (d,), turn.q_norm, turn.eps)
        k = F.rms_norm(k, (d,), turn.k_norm, turn.eps)
    cosine, sine = turn.cos[positions][:, None], turn.sin[positions][:, None]
    q, k = (x * cosine + _half_turned(x) * sine for x in (q, k))
    store(k, v, slots, cache, layer)
    return q, k, v


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def store(k: Tensor, v: Tensor, slots: Tensor, cache: PagedCache, layer: int) -> None:
    """Keys and values [N, KV, D] into their cells."""
    keys, values = cache.layer(layer)
    page, offset = slots // cache.page_size, slots % cache.page_size
    keys[page, :, offset] = k[: len(slots)]
    values[page, :, offset] = v[: len(slots)]


def decode_attention(
    q: Tensor,  # [N, H, D]
    cache: PagedCache,
    layer: int,
    table: Tensor,  # [N, W] pages
    positions: Tensor,  # [N] of the newest key
    *,
    scaling: float,
    window: int | None,
    splits: int,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [H]
) -> Tensor:
    """One query a row over the row's pages, its newest key included."""
    keys, values = cache.layer(layer)
    rows, heads, d = q.shape
    width = (int(positions.max()) // cache.page_size + 1) * cache.page_size
    pages = table[:, : width // cache.page_size].long()
    kk, vv = (
        x[pages].permute(0, 2, 1, 3, 4).reshape(rows, cache.kv_heads, width, d)
        for x in (keys, values)
    )
    distance = positions[:, None] - torch.arange(width, device=q.device)
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    queries = q.reshape(rows, cache.kv_heads, -1, d)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(
            queries, kk, vv, attn_mask=seen[:, None, None], scale=scaling
        )
        return out.reshape(rows, heads, d)
    scores = cap(torch.matmul(queries.float(), kk.float().transpose(2, 3)) * scaling, softcap)
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    weights = weigh(scores, None if sinks is None else sinks.view(cache.kv_heads, -1, 1))
    return torch.matmul(weights.to(vv.dtype), vv).reshape(rows, heads, d)


def rope_attention(
    qkv: Tensor,
    turn: Turn,
    positions: Tensor,
    slots: Tensor,
    cache: PagedCache,
    layer: int,
    table: Tensor,
    *,
    scaling: float,
    window: int | None,
    splits: int,
) -> Tensor:
    """Rotation, cache write and attention of one new token a row."""
    q, _, _ = rope_store(qkv, turn, positions, slots, cache, layer, keep_keys=False)
    return decode_attention(
        q, cache, layer, table, positions, scaling=scaling, window=window, splits=splits
    )


def sample(logits: Tensor, rows: RowState, page_size: int) -> None:
    """Draw one token a row from its logits [R, V], and move the rows on."""
    z = logits.float() * rows.inverse_temperature[:, None]
    sample_from(torch.log_softmax(z, -1), z.argmax(-1), rows, page_size)


def sample_from(log_p: Tensor, best: Tensor, rows: RowState, page_size: int) -> None:
    """Invert the cumulative distribution of log_p [R, V]; greedy rows take their best [R]."""
    cumulative = log_p.exp().cumsum(-1)
    threshold = uniform(rows.seed, rows.position + 1) * cumulative[:, -1].double()
    token = torch.searchsorted(cumulative.double(), threshold[:, None], right=True).squeeze(-1)
    token = torch.where(rows.greedy != 0, best, token.clamp(max=log_p.shape[-1] - 1))
    advance(token, log_p.gather(-1, token[:, None]).squeeze(-1), rows, page_size)


def advance(tokens: Tensor, log_probs: Tensor, rows: RowState, page_size: int) -> None:
    """Write drawn tokens and move their rows on; finished rows stay as they are."""
    running = (rows.finished == 0).nonzero().flatten()
    at = rows.count[running]
    rows.tokens_out[running, at] = tokens[running].to(rows.tokens_out.dtype)
    rows.log_probs_out[running, at] = log_probs[running]
    rows.count[running] += 1
    stopped = (rows.stops[running] == tokens[running, None]).any(1)
    position = rows.position[running] + 1
    finished = stopped | (position + 1 >= rows.limit[running])
    rows.finished[running] = finished.long()
    moving, position = running[~finished], position[~finished]
    rows.token[moving] = tokens[moving]
    rows.position[moving] = position
    page = rows.table[moving, position // page_size].long()
    rows.slot[moving] = page * page_size + position % page_size
