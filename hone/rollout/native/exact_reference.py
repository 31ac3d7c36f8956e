"""Exact mode on a CPU: the engine's kernels, each row's bits a function of that row alone.

A library picks its path, and with it the order of a sum, by the shape of the call. So every call here
has one shape: blocks of `ROWS` rows, the last one filled up, and keys up to a multiple of `_KEYS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.rollout.native.kernels_reference import advance, rope_store, sample_from, store

if TYPE_CHECKING:
    from hone.rollout.native.exact_layouts import Queries
    from hone.rollout.native.paged_cache import PagedCache
    from hone.rollout.native.paged_rows import RowState

__all__ = [
    "add_rms_norm",
    "advance",
    "linear",
    "log_probs_of",
    "query_attention",
    "rope_store",
    "sample",
    "silu_mul",
    "store",
]

ROWS = 32
"""Rows of every block: enough to use a processor well, few enough not to be wasted on a small batch."""
_KEYS = 64
"""A query sees a multiple of this many cells, the first ones its own sequence's."""
_HEADS = 8
"""Query heads of an item are filled up to a multiple: products of fewer rows round as memory lies."""
_SERIAL = 32768
"""Elements of one elementwise call: no more are computed by one thread, without a seam inside."""
_LANES = 32
"""Elements that vector registers take at once; an odd end would be computed by another formula."""


def in_blocks(compute: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """`compute` over `ROWS` rows of each tensor at a time; what fills the last block is cut off."""
    count = len(rows[0])
    short = -count % ROWS
    if short:
        rows = tuple(torch.cat([x, x.new_zeros(short, *x.shape[1:])]) for x in rows)
    blocks = [compute(*pieces) for pieces in zip(*(x.split(ROWS) for x in rows), strict=True)]
    if not blocks:
        return compute(*(x.new_zeros(ROWS, *x.shape[1:]) for x in rows))[:0]
    return torch.cat(blocks)[:count] if len(blocks) > 1 else blocks[0][:count]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
    """The product; `wide` asks for float32, which it is here."""
    return in_blocks(lambda block: F.linear(block.contiguous(), weight, bias), x)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual

    def norm(block: Tensor) -> Tensor:
        scale = torch.rsqrt(block.square().mean(-1, keepdim=True) + eps)
        return block * scale * weight

    return in_blocks(norm, total), total


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
    """Each query over the cells of its row up to its position. One call serves queries that see equally
    many cells, and every query is an item of its own, so its sums know nothing of its neighbours."""
    out = torch.empty_like(q)
    bucket = queries.position // _KEYS
    for width in bucket.unique().tolist():
        chosen = (bucket == width).nonzero().flatten()
        rows = queries.row[chosen]
        if len(rows.unique()) == len(rows):  # decoding: one query a row
            out[chosen] = _attend(q, cache, layer, queries, chosen, rows, width, scaling)
            continue
        for row in rows.unique():
            own = chosen[rows == row]
            out[own] = _attend(q, cache, layer, queries, own, row[None], width, scaling)
    return out


def _attend(
    q: Tensor,
    cache: PagedCache,
    layer: int,
    queries: Queries,
    chosen: Tensor,
    rows: Tensor,
    bucket: int,
    scaling: float,
) -> Tensor:
    width, size, d = (bucket + 1) * _KEYS, cache.page_size, cache.head_dim
    reach = min(width // size, queries.table.shape[1])
    pages = queries.table[rows, :reach].long()
    pages = F.pad(pages, (0, width // size - reach))  # the spare page; it is never seen
    keys, values = (
        x[pages]
        .permute(0, 2, 1, 3, 4)
        .reshape(len(rows), cache.kv_heads, width, d)
        .expand(len(chosen), -1, -1, -1)
        for x in cache.layer(layer)
    )
    seen = queries.position[chosen][:, None] >= torch.arange(width)
    bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, float("-inf"))
    grouped = q[chosen].reshape(len(chosen), cache.kv_heads, -1, d)
    heads = grouped.shape[2]
    out = F.scaled_dot_product_attention(
        F.pad(grouped, (0, 0, 0, -heads % _HEADS)),
        keys,
        values,
        attn_mask=bias[:, None, None],
        scale=scaling,
    )
    return out[:, :, :heads].reshape(len(chosen), -1, d)


def log_softmax(logits: Tensor, inverse_temperature: Tensor) -> Tensor:
    """log p [N, V] of logits [N, V] at the rows' temperatures [N]."""
    return in_blocks(
        lambda z, t: torch.log_softmax(z * t[:, None], -1), logits, inverse_temperature
    )


def log_probs_of(logits: Tensor, tokens: Tensor, inverse_temperature: Tensor) -> Tensor:
    """log p of one token a row."""
    log_p = log_softmax(logits, inverse_temperature)
    return log_p.gather(-1, tokens[:, None]).squeeze(-1)


def sample(logits: Tensor, rows: RowState, page_size: int) -> None:
    """As kernels_reference.sample, with exact log-probs."""
    log_p = log_softmax(logits, rows.inverse_temperature)
    sample_from(log_p, log_p.argmax(-1), rows, page_size)
