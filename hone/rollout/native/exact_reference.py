"""Batch-invariant CPU kernels of exact mode: the result of a row depends on that row alone.

Libraries choose their summation order by the shape of a call. So products, norms and softmax always get
`CHUNK_ROWS` rows, padded with zeros, and attention reads a multiple of `_KEY_MULTIPLE` keys.
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
    from hone.rollout.native.decode_step import BatchState
    from hone.rollout.native.paged_cache import PagedCache
    from hone.rollout.native.paged_layouts import Queries

CHUNK_ROWS = 32
"""Rows per call: enough to use the CPU well, and few enough that a small batch has little padding."""
_KEY_MULTIPLE = 64
"""A query reads a multiple of this many keys; keys after the query's position are masked."""
_HEAD_MULTIPLE = 8
"""Query heads are padded to a multiple of this, because the rounding of smaller products depends
on memory alignment."""
_SERIAL_ELEMENTS = 32768
"""Elements per elementwise call: few enough that torch uses one thread."""
_VECTOR_ELEMENTS = 32
"""Rows are padded to a multiple of this many elements, because torch computes the elements of a partial
vector register by another formula."""


def map_row_chunks(compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Applies `compute` to chunks of `CHUNK_ROWS` rows of the tensors; concatenates the results."""
    num_rows = len(tensors[0])
    padding = -num_rows % CHUNK_ROWS
    if padding:
        tensors = tuple(torch.cat([x, x.new_zeros(padding, *x.shape[1:])]) for x in tensors)
    chunks = zip(*(x.split(CHUNK_ROWS) for x in tensors), strict=True)
    results = [compute(*chunk) for chunk in chunks]
    return torch.cat(results)[:num_rows] if len(results) > 1 else results[0][:num_rows]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, float32_out: bool = False) -> Tensor:
    """Returns x Wᵀ + bias; `float32_out` is ignored, because exact mode on a CPU is float32."""
    return map_row_chunks(lambda chunk: F.linear(chunk.contiguous(), weight, bias), x)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual

    def norm(chunk: Tensor) -> Tensor:
        scale = torch.rsqrt(chunk.square().mean(-1, keepdim=True) + eps)
        return chunk * scale * weight

    return map_row_chunks(norm, total), total


def silu_mul(gate_up: Tensor) -> Tensor:  # [N, 2 F] -> [N, F]
    gate, up = gate_up.chunk(2, -1)
    width = gate.shape[1]
    flat = F.pad(gate, (0, -width % _VECTOR_ELEMENTS)).flatten()
    pieces = [F.silu(piece) for piece in flat.split(_SERIAL_ELEMENTS)]
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
    """Returns the attention of each query over its row of the block table, up to its position.

    One call computes the queries that read the same number of keys. Each query is a separate batch
    item, so its sums do not depend on the other queries.
    """
    block_size, group = cache.block_size, q.shape[1] // cache.kv_heads
    out = torch.empty_like(q)

    def attend(indices: Tensor, rows: Tensor, num_keys: int) -> None:
        """Writes the attention of queries to `out`; `rows` has the row of each query, or one row for all."""
        num_blocks = min(num_keys // block_size, queries.block_table.shape[1])
        blocks = queries.block_table[rows, :num_blocks]
        blocks = F.pad(blocks, (0, num_keys // block_size - num_blocks))  # the null block is masked
        keys, values = (x.expand(len(indices), -1, -1, -1) for x in cache.gather(layer, blocks))
        bias = as_bias(queries.position[indices][:, None] >= torch.arange(num_keys), q.dtype)
        grouped = q[indices].unflatten(1, (cache.kv_heads, group))
        padded = F.pad(grouped, (0, 0, 0, -group % _HEAD_MULTIPLE))
        padded_out = F.scaled_dot_product_attention(
            padded, keys, values, attn_mask=bias[:, None, None], scale=scaling
        )
        out[indices] = padded_out[:, :, :group].flatten(1, 2)

    key_counts = (queries.position // _KEY_MULTIPLE + 1) * _KEY_MULTIPLE
    for num_keys in key_counts.unique().tolist():
        indices = (key_counts == num_keys).nonzero().flatten()
        rows = queries.row[indices]
        if len(rows.unique()) == len(rows):  # decoding: one query per row
            attend(indices, rows, num_keys)
        else:
            for row in rows.unique():
                attend(indices[rows == row], row[None], num_keys)
    return out


def log_softmax(logits: Tensor, inverse_temperature: Tensor) -> Tensor:
    """Returns log p [N, V] of logits [N, V] at the inverse temperatures [N]."""
    return map_row_chunks(
        lambda z, t: torch.log_softmax(z * t[:, None], -1), logits, inverse_temperature
    )


def token_log_probs(logits: Tensor, tokens: Tensor, inverse_temperature: Tensor) -> Tensor:
    """Returns log p of one token per row."""
    log_p = log_softmax(logits, inverse_temperature)
    return log_p.gather(-1, tokens[:, None]).squeeze(-1)


def sample(logits: Tensor, batch: BatchState, block_size: int) -> None:
    """Samples as kernels_reference.sample does, with the log-probs of `token_log_probs`."""
    log_p = log_softmax(logits, batch.inverse_temperature)
    sample_from(log_p, log_p.argmax(-1), batch, block_size)
