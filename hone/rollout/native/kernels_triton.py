"""The GPU kernels of the native engine: gated product, rotation with cache write, and sampling.

This module is imported only on a GPU. It also exports the kernels of attention_triton.py. Public
functions have the signatures and results of those in kernels_reference.py. Kernels load the address of
the cache from device memory, so captured graphs stay valid when the cache is allocated again.

Sampling reads all logits once, in chunks, and then the chunk of the sampled token again. sampler.py
samples requests with top-k, top-p or min-p, and `advance` writes their tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.ops.training_triton import add_rms_norm as add_rms_norm
from hone.rollout.native.attention_triton import decode_attention as decode_attention
from hone.rollout.native.attention_triton import rope_attention as rope_attention

if TYPE_CHECKING:
    from hone.rollout.native.decode_step import BatchState
    from hone.rollout.native.kernels_reference import RotaryTable
    from hone.rollout.native.paged_cache import PagedCache


@triton.jit
def _silu_mul(x_ptr, out_ptr, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(x_ptr + row * 2 * width + column, mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + column, mask, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up  # rounded once, as in training
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    block = min(1024, triton.next_power_of_2(width))
    _silu_mul[(rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _rope_store(  # type: ignore[no-untyped-def]
    qkv_ptr, cos_ptr, sin_ptr, position_ptr, slot_ptr, q_out_ptr, k_out_ptr, base_ptr,
    k_offset: tl.int64, v_offset: tl.int64, q_norm_ptr, k_norm_ptr, eps,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HEADS_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr, RETURN_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = D // 2
    h = tl.arange(0, HEADS_PAD)[:, None]
    i = tl.arange(0, HALF_PAD)[None, :]
    in_half = i < half
    mask = in_half & (h < H + 2 * KV)
    dtype = qkv_ptr.dtype.element_ty
    head_ptr = qkv_ptr + token * ((H + 2 * KV) * D) + h * D + i
    first = tl.load(head_ptr, mask, other=0.0)
    second = tl.load(head_ptr + half, mask, other=0.0)
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    if NORM:
        square_sum = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        scale = tl.rsqrt(square_sum / D + eps)[:, None]
        is_q = h < H
        q_weight = tl.load(q_norm_ptr + i, in_half, other=0.0).to(tl.float32)
        k_weight = tl.load(k_norm_ptr + i, in_half, other=0.0).to(tl.float32)
        a = (a * scale * tl.where(is_q, q_weight, k_weight)).to(dtype).to(tl.float32)
        q_weight = tl.load(q_norm_ptr + half + i, in_half, other=0.0).to(tl.float32)
        k_weight = tl.load(k_norm_ptr + half + i, in_half, other=0.0).to(tl.float32)
        b = (b * scale * tl.where(is_q, q_weight, k_weight)).to(dtype).to(tl.float32)
    rotary_offset = tl.load(position_ptr + token) * D + i
    cos_a = tl.load(cos_ptr + rotary_offset, in_half, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_ptr + rotary_offset + half, in_half, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_ptr + rotary_offset, in_half, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_ptr + rotary_offset + half, in_half, other=0.0).to(tl.float32)
    rotated = h < H + KV
    first = tl.where(rotated, (a * cos_a - b * sin_a).to(dtype), first)
    second = tl.where(rotated, (b * cos_b + a * sin_b).to(dtype), second)
    q_out = q_out_ptr + (token * H + h) * D + i
    tl.store(q_out, first, in_half & (h < H))
    tl.store(q_out + half, second, in_half & (h < H))
    kv_head = (h - H + KV) % KV
    if RETURN_K:
        is_k = in_half & (h >= H) & rotated
        k_out = k_out_ptr + (token * KV + kv_head) * D + i
        tl.store(k_out, first, is_k)
        tl.store(k_out + half, second, is_k)
    slot = tl.load(slot_ptr + token)
    slot_offset = ((slot // BLOCK_SIZE) * KV + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    layer_offset = tl.where(rotated, k_offset, v_offset)
    cache_ptr = tl.load(base_ptr).to(tl.pointer_type(dtype)) + layer_offset + slot_offset * D + i
    kv_mask = mask & (h >= H)
    tl.store(cache_ptr, first, kv_mask)
    tl.store(cache_ptr + half, second, kv_mask)


def rope_store(
    qkv: Tensor,
    rotary: RotaryTable,
    positions: Tensor,
    slots: Tensor,
    cache: PagedCache,
    layer: int,
    *,
    return_keys: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, kv, d = qkv.shape[0], cache.kv_heads, cache.head_dim
    heads = qkv.shape[1] // d - 2 * kv
    q = qkv.new_empty(tokens, heads, d)
    k = qkv.new_empty(tokens if return_keys else 0, kv, d)
    k_offset, v_offset = cache.kv_offsets(layer)
    _rope_store[(tokens,)](
        qkv, rotary.cos, rotary.sin, positions, slots, q, k, cache.base_address, k_offset, v_offset,
        rotary.q_norm if rotary.q_norm is not None else qkv,
        rotary.k_norm if rotary.k_norm is not None else qkv,
        rotary.eps,
        H=heads, KV=kv, D=d, HEADS_PAD=triton.next_power_of_2(heads + 2 * kv),
        HALF_PAD=triton.next_power_of_2(d // 2), BLOCK_SIZE=cache.block_size,
        NORM=rotary.q_norm is not None, RETURN_K=return_keys, num_warps=4,
    )  # fmt: skip
    v = qkv[:, (heads + kv) * d :].view(tokens, kv, d)
    return q, k, v


@triton.jit
def _store_kv(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, slot_ptr, base_ptr, k_offset: tl.int64, v_offset: tl.int64, k_stride, v_stride,
    k_head_stride, v_head_stride,
    KV: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, D_PAD)
    mask = i < D
    slot = tl.load(slot_ptr + token)
    slot_offset = ((slot // BLOCK_SIZE) * KV + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    base = tl.load(base_ptr).to(tl.pointer_type(k_ptr.dtype.element_ty)) + slot_offset * D
    tl.store(
        base + k_offset + i,
        tl.load(k_ptr + token * k_stride + head * k_head_stride + i, mask),
        mask,
    )
    tl.store(
        base + v_offset + i,
        tl.load(v_ptr + token * v_stride + head * v_head_stride + i, mask),
        mask,
    )


def store_kv(k: Tensor, v: Tensor, slots: Tensor, cache: PagedCache, layer: int) -> None:
    k_offset, v_offset = cache.kv_offsets(layer)
    _store_kv[(slots.shape[0], cache.kv_heads)](
        k, v, slots, cache.base_address, k_offset, v_offset, k.stride(0), v.stride(0),
        k.stride(1), v.stride(1),
        KV=cache.kv_heads, D=cache.head_dim, D_PAD=triton.next_power_of_2(cache.head_dim),
        BLOCK_SIZE=cache.block_size, num_warps=1,
    )  # fmt: skip


_CHUNK_LOGITS = 4096
"""Number of logits per chunk; in the first pass, each program reads one chunk."""
_STATS_WARPS, _SAMPLE_WARPS = 4, 8


@triton.jit
def _logit_stats(  # type: ignore[no-untyped-def]
    logits_ptr, inverse_temperature_ptr, max_logit_ptr, exp_sum_ptr, argmax_ptr, vocab_size,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    z = tl.load(logits_ptr + row * vocab_size + i, i < vocab_size, other=float("-inf"))
    z = z.to(tl.float32) * tl.load(inverse_temperature_ptr + row)
    z = tl.where(i < vocab_size, z, float("-inf"))
    max_logit = tl.max(z, 0)
    offset = row * CHUNKS + chunk
    tl.store(max_logit_ptr + offset, max_logit)
    tl.store(exp_sum_ptr + offset, tl.sum(tl.exp(z - max_logit), 0))
    tl.store(argmax_ptr + offset, chunk * CHUNK + tl.argmax(z, 0))


@triton.jit
def _logsumexp(  # type: ignore[no-untyped-def]
    max_logit_ptr, exp_sum_ptr, lse_ptr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS_PAD)
    max_logits = tl.load(max_logit_ptr + row * CHUNKS + c, c < CHUNKS, other=float("-inf"))
    exp_sums = tl.load(exp_sum_ptr + row * CHUNKS + c, c < CHUNKS, other=0.0)
    max_logit = tl.max(max_logits, 0)
    total = tl.sum(exp_sums * tl.exp(max_logits - max_logit), 0)
    tl.store(lse_ptr + row, max_logit + tl.log(total))


@triton.jit
def _token_log_prob(  # type: ignore[no-untyped-def]
    logits_ptr, inverse_temperature_ptr, token_ptr, lse_ptr, out_ptr, vocab_size,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ptr + row)
    i = tl.arange(0, CHUNK)
    offset = token // CHUNK * CHUNK + i
    z = tl.load(logits_ptr + row * vocab_size + offset, offset < vocab_size, other=float("-inf"))
    z = z.to(tl.float32) * tl.load(inverse_temperature_ptr + row)
    # The sum, as in `_sample`, keeps the compiler from fusing the product and the difference, which
    # would round once instead of twice.
    logit = tl.sum(tl.where(offset == token, z, 0.0), 0)
    tl.store(out_ptr + row, logit - tl.load(lse_ptr + row))


@triton.jit
def _mix64(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _advance(  # type: ignore[no-untyped-def]
    row, token, log_prob, state_ptr, state_stride, log_probs_out_ptr, tokens_out_ptr, table_ptr,
    table_stride, stop_ids_ptr,
    NUM_STOP_IDS: tl.constexpr, BLOCK_SIZE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Writes one sampled token and moves its row to the next position, unless the row is finished."""
    # The factors of state_stride are indices in STATE_FIELDS of decode_step.py.
    position = tl.load(state_ptr + 1 * state_stride + row)
    max_length = tl.load(state_ptr + 4 * state_stride + row)
    running = tl.load(state_ptr + 5 * state_stride + row) == 0
    num_sampled = tl.load(state_ptr + 6 * state_stride + row)
    stop_ids = tl.load(stop_ids_ptr + row * NUM_STOP_IDS + tl.arange(0, NUM_STOP_IDS))
    stopped = tl.sum((stop_ids == token).to(tl.int32), 0) > 0
    position += 1
    finished = stopped | (position + 1 >= max_length)
    tl.store(tokens_out_ptr + row * CAPACITY + num_sampled, token, running)
    tl.store(log_probs_out_ptr + row * CAPACITY + num_sampled, log_prob, running)
    tl.store(state_ptr + 6 * state_stride + row, num_sampled + 1, running)
    tl.store(state_ptr + 5 * state_stride + row, finished.to(tl.int64), running)
    advancing = running & (not finished)
    entry = table_ptr + row * table_stride + position // BLOCK_SIZE
    block = tl.load(entry, advancing, other=0).to(tl.int64)
    tl.store(state_ptr + row, token, advancing)
    tl.store(state_ptr + 1 * state_stride + row, position, advancing)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(state_ptr + 2 * state_stride + row, slot, advancing)


@triton.jit
def _sample(  # type: ignore[no-untyped-def]
    logits_ptr, inverse_temperature_ptr, greedy_ptr, max_logit_ptr, exp_sum_ptr, argmax_ptr,
    lse_ptr, vocab_size, state_ptr, state_stride, log_probs_out_ptr, tokens_out_ptr, table_ptr,
    table_stride, stop_ids_ptr,
    CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, CHUNK: tl.constexpr, EXACT: tl.constexpr,
    NUM_STOP_IDS: tl.constexpr, BLOCK_SIZE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS_PAD)
    max_logits = tl.load(max_logit_ptr + row * CHUNKS + c, c < CHUNKS, other=float("-inf"))
    exp_sums = tl.load(exp_sum_ptr + row * CHUNKS + c, c < CHUNKS, other=0.0)
    max_logit = tl.max(max_logits, 0)
    chunk_mass = exp_sums * tl.exp(max_logits - max_logit)
    total = tl.sum(chunk_mass, 0)
    if EXACT:
        lse = tl.load(lse_ptr + row)
    else:
        lse = max_logit + tl.log(total)
    position = tl.load(state_ptr + 1 * state_stride + row)
    seed = tl.load(state_ptr + 3 * state_stride + row).to(tl.uint64, bitcast=True)
    golden: tl.constexpr = 0x9E3779B97F4A7C15
    bits = _mix64(_mix64(seed + golden) + (position + 1).to(tl.uint64, bitcast=True) * golden)
    uniform = (bits >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)
    threshold = (uniform * total.to(tl.float64)).to(tl.float32)
    # Finds the chunk where the cumulative mass exceeds the threshold, then the token in the chunk.
    cumulative = tl.cumsum(chunk_mass, 0)
    last_chunk = tl.max(tl.where(chunk_mass > 0, c, 0), 0)
    chunk = tl.minimum(tl.sum((cumulative <= threshold).to(tl.int32), 0), last_chunk)
    mass_before_chunk = tl.sum(tl.where(c == chunk, cumulative - chunk_mass, 0.0), 0)
    i = tl.arange(0, CHUNK)
    offset = chunk * CHUNK + i
    z = tl.load(logits_ptr + row * vocab_size + offset, offset < vocab_size, other=float("-inf"))
    z = z.to(tl.float32) * tl.load(inverse_temperature_ptr + row)
    mass = tl.where(offset < vocab_size, tl.exp(z - max_logit), 0.0)
    cumulative_in_chunk = tl.cumsum(mass, 0)
    last_index = tl.max(tl.where(mass > 0, i, 0), 0)
    is_before = (cumulative_in_chunk <= threshold - mass_before_chunk).to(tl.int32)
    index = tl.minimum(tl.sum(is_before, 0), last_index)
    log_prob = tl.sum(tl.where(i == index, z, 0.0), 0) - lse
    token = (chunk * CHUNK + index).to(tl.int64)
    if tl.load(greedy_ptr + row) != 0:
        argmax_chunk = tl.argmax(max_logits, 0)
        token = tl.load(argmax_ptr + row * CHUNKS + argmax_chunk).to(tl.int64)
        log_prob = max_logit - lse
    _advance(
        row, token, log_prob, state_ptr, state_stride, log_probs_out_ptr, tokens_out_ptr, table_ptr,
        table_stride, stop_ids_ptr, NUM_STOP_IDS, BLOCK_SIZE, CAPACITY,
    )  # fmt: skip


def sample(logits: Tensor, batch: BatchState, block_size: int, *, exact: bool = False) -> None:
    """Samples one token per row; with `exact`, log-probs equal those of `token_log_probs`."""
    num_rows, vocab_size = logits.shape
    max_logit, exp_sum, argmax = _chunk_statistics(logits, batch.inverse_temperature)
    chunks = max_logit.shape[1]
    lse = _exact_logsumexp(max_logit, exp_sum) if exact else max_logit
    _sample[(num_rows,)](
        logits, batch.inverse_temperature, batch.greedy, max_logit, exp_sum, argmax, lse,
        vocab_size, batch.state, batch.state.stride(0), batch.log_probs_out, batch.tokens_out,
        batch.block_table, batch.block_table.stride(0), batch.stop_ids,
        CHUNKS=chunks, CHUNKS_PAD=triton.next_power_of_2(chunks), CHUNK=_CHUNK_LOGITS, EXACT=exact,
        NUM_STOP_IDS=batch.stop_ids.shape[1], BLOCK_SIZE=block_size,
        CAPACITY=batch.tokens_out.shape[1], num_warps=_SAMPLE_WARPS,
    )  # fmt: skip


def token_log_probs(logits: Tensor, tokens: Tensor, inverse_temperature: Tensor) -> Tensor:
    """Returns the log-prob of one token per row, [R] float32."""
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    max_logit, exp_sum, _ = _chunk_statistics(logits, inverse_temperature)
    _token_log_prob[(num_rows,)](
        logits, inverse_temperature, tokens, _exact_logsumexp(max_logit, exp_sum), out, vocab_size,
        CHUNK=_CHUNK_LOGITS, num_warps=_SAMPLE_WARPS,
    )  # fmt: skip
    return out


def _chunk_statistics(logits: Tensor, inverse_temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns maximum, sum of exponentials and argmax of each chunk of logits, [rows, chunks]."""
    num_rows, vocab_size = logits.shape
    chunks = triton.cdiv(vocab_size, _CHUNK_LOGITS)
    max_logit = torch.empty(num_rows, chunks, dtype=torch.float32, device=logits.device)
    exp_sum = torch.empty_like(max_logit)
    argmax = torch.empty(num_rows, chunks, dtype=torch.int32, device=logits.device)
    _logit_stats[(num_rows, chunks)](
        logits, inverse_temperature, max_logit, exp_sum, argmax, vocab_size,
        CHUNKS=chunks, CHUNK=_CHUNK_LOGITS, num_warps=_STATS_WARPS,
    )  # fmt: skip
    return max_logit, exp_sum, argmax


def _exact_logsumexp(max_logit: Tensor, exp_sum: Tensor) -> Tensor:
    num_rows, chunks = max_logit.shape
    lse = torch.empty(num_rows, dtype=torch.float32, device=max_logit.device)
    _logsumexp[(num_rows,)](
        max_logit, exp_sum, lse, CHUNKS=chunks, CHUNKS_PAD=triton.next_power_of_2(chunks),
        num_warps=1,
    )  # fmt: skip
    return lse


@triton.jit
def _advance_rows(  # type: ignore[no-untyped-def]
    token_ptr, log_prob_ptr, state_ptr, state_stride, log_probs_out_ptr, tokens_out_ptr, table_ptr,
    table_stride, stop_ids_ptr,
    NUM_STOP_IDS: tl.constexpr, BLOCK_SIZE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    _advance(
        row, tl.load(token_ptr + row), tl.load(log_prob_ptr + row), state_ptr, state_stride,
        log_probs_out_ptr, tokens_out_ptr, table_ptr, table_stride, stop_ids_ptr, NUM_STOP_IDS,
        BLOCK_SIZE, CAPACITY,
    )  # fmt: skip


def advance(tokens: Tensor, log_probs: Tensor, batch: BatchState, block_size: int) -> None:
    _advance_rows[(tokens.shape[0],)](
        tokens, log_probs, batch.state, batch.state.stride(0), batch.log_probs_out,
        batch.tokens_out, batch.block_table, batch.block_table.stride(0), batch.stop_ids,
        NUM_STOP_IDS=batch.stop_ids.shape[1], BLOCK_SIZE=block_size,
        CAPACITY=batch.tokens_out.shape[1], num_warps=1,
    )  # fmt: skip
