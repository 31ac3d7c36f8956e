"""What the GPU kernels compute, in plain torch: CPU tests run it, GPU tests compare with it.

Each function is the namesake of one in kernels_triton.py, attention_triton.py and sampling_triton.py.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops.attention import AttentionOptions, is_visible, soft_cap, softmax_with_sinks
from hone.ops.counter_rng import uniform

if TYPE_CHECKING:
    from hone.rollout.native.batch_state import BatchState
    from hone.rollout.native.paged_cache import PagedCache


def kernels_for(device: torch.device, *, exact: bool = False) -> ModuleType:
    """The module of a device's kernels: Triton on a GPU, the torch reference elsewhere."""
    kind = "exact" if exact else "kernels"
    place = "triton" if device.type == "cuda" else "reference"
    return importlib.import_module(f"hone.rollout.native.{kind}_{place}")


class RotaryTable(NamedTuple):
    """Cosines and sines of every position, and the norms of queries and keys before the rotation."""

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
    rotary: RotaryTable,
    positions: Tensor,  # [N]
    slots: Tensor,  # [N] block * block_size + offset
    cache: PagedCache,
    layer: int,
    *,
    keep_keys: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values; keys and values are written into the cache."""
    kv, d = cache.kv_heads, cache.head_dim
    q, k, v = qkv.unflatten(1, (-1, d)).split([qkv.shape[1] // d - 2 * kv, kv, kv], 1)
    if rotary.q_norm is not None and rotary.k_norm is not None:
        q = F.rms_norm(q, (d,), rotary.q_norm, rotary.eps)
        k = F.rms_norm(k, (d,), rotary.k_norm, rotary.eps)
    cos, sin = rotary.cos[positions][:, None], rotary.sin[positions][:, None]
    q, k = (x * cos + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin for x in (q, k))
    store(k, v, slots, cache, layer)
    return q, k, v


def store(k: Tensor, v: Tensor, slots: Tensor, cache: PagedCache, layer: int) -> None:
    """Write keys and values [N, KV, D] into their slots."""
    keys, values = cache.layer(layer)
    block, offset = slots // cache.block_size, slots % cache.block_size
    keys[block, :, offset] = k[: len(slots)]
    values[block, :, offset] = v[: len(slots)]


def decode_attention(
    q: Tensor,  # [N, H, D]
    cache: PagedCache,
    block_table: Tensor,  # [N, W]
    positions: Tensor,  # [N] of the newest key
    options: AttentionOptions,
    *,
    splits: int,
) -> Tensor:
    """One query per sequence over its block table, its newest key included."""
    rows, heads, d = q.shape
    width = int(positions.max()) // cache.block_size + 1
    kk, vv = cache.gather(options.layer, block_table[:, :width])
    distance = positions[:, None] - torch.arange(kk.shape[2], device=q.device)
    visible = is_visible(distance, options.window)[:, None, None]
    queries = q.reshape(rows, cache.kv_heads, -1, d)
    if not options.needs_scores:
        out = F.scaled_dot_product_attention(
            queries, kk, vv, attn_mask=visible, scale=options.scaling
        )
        return out.reshape(rows, heads, d)
    scores = torch.matmul(queries.float(), kk.float().transpose(2, 3)) * options.scaling
    scores = soft_cap(scores, options.softcap).masked_fill(~visible, float("-inf"))
    sinks = None if options.sinks is None else options.sinks.view(cache.kv_heads, -1, 1)
    return torch.matmul(softmax_with_sinks(scores, sinks).to(vv.dtype), vv).reshape(rows, heads, d)


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
    """Rotation, cache write and attention of one new token per sequence."""
    q, _, _ = rope_store(qkv, rotary, positions, slots, cache, options.layer, keep_keys=False)
    return decode_attention(q, cache, block_table, positions, options, splits=splits)


def sample(logits: Tensor, rows: BatchState, block_size: int) -> None:
    """Draw one token per row from its logits [R, V], and advance the rows."""
    z = logits.float() * rows.inverse_temperature[:, None]
    sample_from(torch.log_softmax(z, -1), z.argmax(-1), rows, block_size)


def sample_from(log_p: Tensor, best: Tensor, rows: BatchState, block_size: int) -> None:
    """Invert the cumulative distribution of log_p [R, V]; greedy rows take their best [R]."""
    cumulative = log_p.exp().cumsum(-1)
    threshold = uniform(rows.seed, rows.position + 1) * cumulative[:, -1].double()
    token = torch.searchsorted(cumulative.double(), threshold[:, None], right=True).squeeze(-1)
    token = torch.where(rows.greedy != 0, best, token.clamp(max=log_p.shape[-1] - 1))
    advance(token, log_p.gather(-1, token[:, None]).squeeze(-1), rows, block_size)


def advance(tokens: Tensor, log_probs: Tensor, rows: BatchState, block_size: int) -> None:
    """Write drawn tokens and advance their rows; finished rows stay unchanged."""
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
    block = rows.block_table[moving, position // block_size].long()
    rows.slot[moving] = block * block_size + position % block_size
