"""Reference implementations of the GPU kernels in torch.

CPU tests run these functions; GPU tests compare them with the Triton kernels of the same names.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops.attention import AttentionOptions, as_bias, is_visible, padded_attention, repeat_heads
from hone.ops.counter_rng import uniform

if TYPE_CHECKING:
    from hone.rollout.native.decode_step import BatchState
    from hone.rollout.native.paged_cache import PagedCache


def kernels_for(device: torch.device, *, exact: bool = False) -> ModuleType:
    """Returns the kernel module of a device: Triton on a GPU, the torch reference elsewhere."""
    prefix = "exact" if exact else "kernels"
    backend = "triton" if device.type == "cuda" else "reference"
    return importlib.import_module(f"hone.rollout.native.{prefix}_{backend}")


class RotaryTable(NamedTuple):
    """Cosines and sines per position, and the weights of the RMSNorm of queries and keys before rotation."""

    cos: Tensor  # [positions, D]
    sin: Tensor
    q_norm: Tensor | None = None  # [D] weight
    k_norm: Tensor | None = None
    eps: float = 0.0


def add_rms_norm(
    x: Tensor,  # [N, d]
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Returns `x + residual` normalized, in the weight's dtype, and the sum itself in float32."""
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
    return_keys: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rotated queries, rotated keys and values; writes keys and values into the cache.

    The GPU kernel returns no keys unless `return_keys`.
    """
    kv, d = cache.kv_heads, cache.head_dim
    q, k, v = qkv.unflatten(1, (-1, d)).split([qkv.shape[1] // d - 2 * kv, kv, kv], 1)
    if rotary.q_norm is not None and rotary.k_norm is not None:
        q = F.rms_norm(q, (d,), rotary.q_norm, rotary.eps)
        k = F.rms_norm(k, (d,), rotary.k_norm, rotary.eps)
    cos, sin = rotary.cos[positions][:, None], rotary.sin[positions][:, None]
    q, k = (x * cos + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin for x in (q, k))
    store_kv(k, v, slots, cache, layer)
    return q, k, v


def store_kv(k: Tensor, v: Tensor, slots: Tensor, cache: PagedCache, layer: int) -> None:
    """Writes keys and values [N, KV, D] into their slots."""
    keys, values = cache.layer(layer)
    block, offset = slots // cache.block_size, slots % cache.block_size
    keys[block, :, offset] = k[: len(slots)]
    values[block, :, offset] = v[: len(slots)]


def decode_attention(
    q: Tensor,  # [N, H, D]
    cache: PagedCache,
    block_table: Tensor,  # [N, W]
    positions: Tensor,  # [N] position of the newest key
    options: AttentionOptions,
    *,
    splits: int,
) -> Tensor:
    """Computes attention of one query per sequence over its block table, including its own key.

    The GPU kernel divides the keys of a sequence into `splits` parts, which run in parallel.
    """
    num_blocks = int(positions.max()) // cache.block_size + 1
    k, v = cache.gather(options.layer, block_table[:, :num_blocks])
    distance = positions[:, None] - torch.arange(k.shape[2], device=q.device)
    bias = as_bias(is_visible(distance, options.window), q.dtype)[:, None, None]
    k, v = repeat_heads(q, k, v)
    return padded_attention(q[:, :, None], k, v, bias, options)[:, :, 0]


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
    """Rotates one new token per sequence, writes its key and value, and computes its attention."""
    q, _, _ = rope_store(qkv, rotary, positions, slots, cache, options.layer, return_keys=False)
    return decode_attention(q, cache, block_table, positions, options, splits=splits)


def sample(logits: Tensor, batch: BatchState, block_size: int) -> None:
    """Samples one token per row from logits [R, V], and calls `advance`."""
    z = logits.float() * batch.inverse_temperature[:, None]
    sample_from(torch.log_softmax(z, -1), z.argmax(-1), batch, block_size)


def sample_from(log_p: Tensor, greedy_token: Tensor, batch: BatchState, block_size: int) -> None:
    """Samples from log_p [R, V], or takes `greedy_token` in greedy rows, and calls `advance`."""
    cumulative = log_p.exp().cumsum(-1)
    threshold = uniform(batch.seed, batch.position + 1) * cumulative[:, -1].double()
    token = torch.searchsorted(cumulative.double(), threshold[:, None], right=True).squeeze(-1)
    token = torch.where(batch.greedy != 0, greedy_token, token.clamp(max=log_p.shape[-1] - 1))
    advance(token, log_p.gather(-1, token[:, None]).squeeze(-1), batch, block_size)


def advance(tokens: Tensor, log_probs: Tensor, batch: BatchState, block_size: int) -> None:
    """Writes the sampled tokens and moves each row to its next position; finished rows are unchanged."""
    running_rows = (batch.finished == 0).nonzero().flatten()
    index = batch.num_sampled[running_rows]
    batch.tokens_out[running_rows, index] = tokens[running_rows].to(batch.tokens_out.dtype)
    batch.log_probs_out[running_rows, index] = log_probs[running_rows]
    batch.num_sampled[running_rows] += 1
    stopped = (batch.stop_ids[running_rows] == tokens[running_rows, None]).any(1)
    position = batch.position[running_rows] + 1
    finished = stopped | (position + 1 >= batch.max_length[running_rows])
    batch.finished[running_rows] = finished.long()
    advancing_rows, position = running_rows[~finished], position[~finished]
    batch.token[advancing_rows] = tokens[advancing_rows]
    batch.position[advancing_rows] = position
    block = batch.block_table[advancing_rows, position // block_size].long()
    batch.slot[advancing_rows] = block * block_size + position % block_size
