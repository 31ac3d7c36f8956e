"""Exact mode on a CPU: the engine's kernels, where each row's bits depend on that row alone.

A library picks its path, and with it the order of a sum, by the shape of the call. So every call here
has one shape: `ROWS` rows, the last call filled up with zeros, and keys up to a multiple of `_KEYS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops.attention import as_bias
from hone.rollout.native.kernels_reference import advance as advance
from hone.rollout.native.kernels_reference import rope_store as rope_store
from hone.rollout.native.kernels_reference import sample_from

if TYPE_CHECKING:
    from hone.rollout.native.batch_state import BatchState
    from hone.rollout.native.exact_layouts import Queries
    from hone.rollout.native.paged_cache import PagedCache

ROWS = 32
"""Rows of every call: enough to use a processor well, few enough not to be wasted on a small batch."""
_KEYS = 64
"""A query reads a multiple of this many slots, the first ones its own sequence's."""
_HEADS = 8
"""Query heads are filled up to a multiple: products of fewer rows round by their memory alignment."""
_SERIAL = 32768
"""Elements of one elementwise call: one thread computes that many without a seam inside."""
_LANES = 32
"""Elements per vector register; an odd end would be computed by another formula."""


def by_rows(compute: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """`compute` over `ROWS` rows of each tensor at a time; the rows that fill up are dropped."""
    count = len(rows[0])
    short = -count % ROWS
    if short:
        rows = tuple(torch.cat([x, x.new_zeros(short, *x.shape[1:])]) for x in rows)
    parts = [compute(*pieces) for pieces in zip(*(x.split(ROWS) for x in rows), strict=True)]
    if not parts:
        return compute(*(x.new_zeros(ROWS, *x.shape[1:]) for x in rows))[:0]
    return torch.cat(parts)[:count] if len(parts) > 1 else parts[0][:count]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
    """The product; `wide` asks for float32, which it is here."""
    return by_rows(lambda part: F.linear(part.contiguous(), weight, bias), x)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual

    def norm(part: Tensor) -> Tensor:
        scale = torch.rsqrt(part.square().mean(-1, keepdim=True) + eps)
        return part * scale * weight

    return by_rows(norm, total), total


def silu_mul(gate_up: Tensor) -> Tensor:  # [N, 2 F] -> [N, F]
    gate, up = gate_up.chunk(2, -1)
    width = gate.shape[1]
    flat = F.pad(gate, (0, -width % _LANES)).flatten()
    pieces = [F.silu(piece) for piece in flat.split(_SERIAL)]
    activated = torch.cat(pieces) if pieces else flat
    return activated.view(len(gate), -1)[:, :width] * up


def query_attention(
    q: Tensor,  # [N, H, D]
    cache: PagedCache,
    layer: int,
    queries: Queries,
    *,
    scaling: float,
) -> Tensor:
    """Each query over the slots of its row up to its position.

    One call serves queries that read equally many slots, and every query is an item of its own, so its
    sums do not depend on the other queries.
    """
    out = torch.empty_like(q)
    bucket = queries.position // _KEYS
    for width in bucket.unique().tolist():
        at = (bucket == width).nonzero().flatten()
        rows = queries.row[at]
        if len(rows.unique()) == len(rows):  # decoding: one query per row
            out[at] = _attend(q, cache, layer, queries, at, rows, width, scaling)
            continue
        for row in rows.unique():
            own = at[rows == row]
            out[own] = _attend(q, cache, layer, queries, own, row[None], width, scaling)
    return out


def _attend(
    q: Tensor,
    cache: PagedCache,
    layer: int,
    queries: Queries,
    at: Tensor,
    rows: Tensor,
    bucket: int,
    scaling: float,
) -> Tensor:
    width, size, d = (bucket + 1) * _KEYS, cache.block_size, cache.head_dim
    reach = min(width // size, queries.block_table.shape[1])
    blocks = queries.block_table[rows, :reach]
    blocks = F.pad(blocks, (0, width // size - reach))  # with the null block, which is masked
    keys, values = (x.expand(len(at), -1, -1, -1) for x in cache.gather(layer, blocks))
    bias = as_bias(queries.position[at][:, None] >= torch.arange(width), q.dtype)
    grouped = q[at].reshape(len(at), cache.kv_heads, -1, d)
    heads = grouped.shape[2]
    out = F.scaled_dot_product_attention(
        F.pad(grouped, (0, 0, 0, -heads % _HEADS)),
        keys,
        values,
        attn_mask=bias[:, None, None],
        scale=scaling,
    )
    return out[:, :, :heads].reshape(len(at), -1, d)


def log_softmax(logits: Tensor, inverse_temperature: Tensor) -> Tensor:
    """log p [N, V] of logits [N, V] at the rows' temperatures [N]."""
    return by_rows(lambda z, t: torch.log_softmax(z * t[:, None], -1), logits, inverse_temperature)


def log_probs_of(logits: Tensor, tokens: Tensor, inverse_temperature: Tensor) -> Tensor:
    """log p of one token per row."""
    log_p = log_softmax(logits, inverse_temperature)
    return log_p.gather(-1, tokens[:, None]).squeeze(-1)


def sample(logits: Tensor, rows: BatchState, block_size: int) -> None:
    """As kernels_reference.sample, with exact log-probs."""
    log_p = log_softmax(logits, rows.inverse_temperature)
    sample_from(log_p, log_p.argmax(-1), rows, block_size)
