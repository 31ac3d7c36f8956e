"""The GPU sampling kernels of the native engine.

A first pass reads all logits in chunks; a second reads only the chunk that contains the sampled token.
sampler.py samples requests with top-k, top-p or min-p, and `advance` writes their tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from hone.rollout.native.batch_state import BatchState

_CHUNK = 4096
"""Logits per program of the first pass."""
_STATS_WARPS, _SAMPLE_WARPS = 4, 8


@triton.jit
def _logit_stats(  # type: ignore[no-untyped-def]
    logits_ptr, inverse_temperature_ptr, max_logit_ptr, exp_sum_ptr, best_ptr, vocabulary,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    z = tl.load(logits_ptr + row * vocabulary + i, i < vocabulary, other=float("-inf"))
    z = z.to(tl.float32) * tl.load(inverse_temperature_ptr + row)
    z = tl.where(i < vocabulary, z, float("-inf"))
    max_logit = tl.max(z, 0)
    offset = row * CHUNKS + chunk
    tl.store(max_logit_ptr + offset, max_logit)
    tl.store(exp_sum_ptr + offset, tl.sum(tl.exp(z - max_logit), 0))
    tl.store(best_ptr + offset, chunk * CHUNK + tl.argmax(z, 0))


@triton.jit
def _log_norm(  # type: ignore[no-untyped-def]
    max_logit_ptr, exp_sum_ptr, log_norm_ptr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS_PAD)
    max_logits = tl.load(max_logit_ptr + row * CHUNKS + c, c < CHUNKS, other=float("-inf"))
    exp_sums = tl.load(exp_sum_ptr + row * CHUNKS + c, c < CHUNKS, other=0.0)
    max_logit = tl.max(max_logits, 0)
    total = tl.sum(exp_sums * tl.exp(max_logits - max_logit), 0)
    tl.store(log_norm_ptr + row, max_logit + tl.log(total))


@triton.jit
def _log_prob_at(  # type: ignore[no-untyped-def]
    logits_ptr, inverse_temperature_ptr, token_ptr, log_norm_ptr, out_ptr, vocabulary,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ptr + row)
    i = tl.arange(0, CHUNK)
    offset = token // CHUNK * CHUNK + i
    z = tl.load(logits_ptr + row * vocabulary + offset, offset < vocabulary, other=float("-inf"))
    z = z.to(tl.float32) * tl.load(inverse_temperature_ptr + row)
    # Summed as in `_sample`: the compiler could fuse a product and a difference into one rounding.
    logit = tl.sum(tl.where(offset == token, z, 0.0), 0)
    tl.store(out_ptr + row, logit - tl.load(log_norm_ptr + row))


@triton.jit
def _mix64(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _advance(  # type: ignore[no-untyped-def]
    row, token, log_prob, state_ptr, state_stride, log_prob_ptr, token_out_ptr, table_ptr,
    table_stride, stops_ptr,
    STOPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Writes one sampled token and advances its row, unless the row is finished."""
    position = tl.load(state_ptr + 1 * state_stride + row)
    limit = tl.load(state_ptr + 4 * state_stride + row)
    running = tl.load(state_ptr + 5 * state_stride + row) == 0
    count = tl.load(state_ptr + 6 * state_stride + row)
    stops = tl.load(stops_ptr + row * STOPS + tl.arange(0, STOPS))
    stopped = tl.sum((stops == token).to(tl.int32), 0) > 0
    position += 1
    finished = stopped | (position + 1 >= limit)
    tl.store(token_out_ptr + row * CAPACITY + count, token, running)
    tl.store(log_prob_ptr + row * CAPACITY + count, log_prob, running)
    tl.store(state_ptr + 6 * state_stride + row, count + 1, running)
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
    logits_ptr, inverse_temperature_ptr, greedy_ptr, max_logit_ptr, exp_sum_ptr, best_ptr,
    log_norm_ptr, vocabulary, state_ptr, state_stride, log_prob_ptr, token_out_ptr, table_ptr, table_stride,
    stops_ptr,
    CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, CHUNK: tl.constexpr, EXACT: tl.constexpr,
    STOPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS_PAD)
    max_logits = tl.load(max_logit_ptr + row * CHUNKS + c, c < CHUNKS, other=float("-inf"))
    exp_sums = tl.load(exp_sum_ptr + row * CHUNKS + c, c < CHUNKS, other=0.0)
    max_logit = tl.max(max_logits, 0)
    weight = exp_sums * tl.exp(max_logits - max_logit)
    total = tl.sum(weight, 0)
    if EXACT:
        log_norm = tl.load(log_norm_ptr + row)
    else:
        log_norm = max_logit + tl.log(total)
    position = tl.load(state_ptr + 1 * state_stride + row)
    seed = tl.load(state_ptr + 3 * state_stride + row).to(tl.uint64, bitcast=True)
    golden: tl.constexpr = 0x9E3779B97F4A7C15
    bits = _mix64(_mix64(seed + golden) + (position + 1).to(tl.uint64, bitcast=True) * golden)
    uniform = (bits >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)
    threshold = (uniform * total.to(tl.float64)).to(tl.float32)
    # Finds the chunk where the cumulative mass exceeds the threshold, then the token in the chunk.
    cumulative = tl.cumsum(weight, 0)
    last_chunk = tl.max(tl.where(weight > 0, c, 0), 0)
    chunk = tl.minimum(tl.sum((cumulative <= threshold).to(tl.int32), 0), last_chunk)
    chunk_start = tl.sum(tl.where(c == chunk, cumulative - weight, 0.0), 0)
    i = tl.arange(0, CHUNK)
    offset = chunk * CHUNK + i
    z = tl.load(logits_ptr + row * vocabulary + offset, offset < vocabulary, other=float("-inf"))
    z = z.to(tl.float32) * tl.load(inverse_temperature_ptr + row)
    p = tl.where(offset < vocabulary, tl.exp(z - max_logit), 0.0)
    chunk_cumulative = tl.cumsum(p, 0)
    last_index = tl.max(tl.where(p > 0, i, 0), 0)
    before = (chunk_cumulative <= threshold - chunk_start).to(tl.int32)
    index = tl.minimum(tl.sum(before, 0), last_index)
    log_prob = tl.sum(tl.where(i == index, z, 0.0), 0) - log_norm
    token = (chunk * CHUNK + index).to(tl.int64)
    if tl.load(greedy_ptr + row) != 0:
        best_chunk = tl.argmax(max_logits, 0)
        token = tl.load(best_ptr + row * CHUNKS + best_chunk).to(tl.int64)
        log_prob = max_logit - log_norm
    _advance(
        row, token, log_prob, state_ptr, state_stride, log_prob_ptr, token_out_ptr, table_ptr,
        table_stride, stops_ptr, STOPS, BLOCK_SIZE, CAPACITY,
    )  # fmt: skip


def sample(logits: Tensor, rows: BatchState, block_size: int, *, exact: bool = False) -> None:
    """Samples one token per row; with `exact`, log-probs are bitwise those of `log_probs_of`."""
    count, vocabulary = logits.shape
    max_logit, exp_sum, best = _statistics(logits, rows.inverse_temperature)
    chunks = max_logit.shape[1]
    log_norm = _exact_log_norm(max_logit, exp_sum) if exact else max_logit
    _sample[(count,)](
        logits, rows.inverse_temperature, rows.greedy, max_logit, exp_sum, best, log_norm, vocabulary,
        rows.state, rows.state.stride(0), rows.log_probs_out, rows.tokens_out,
        rows.block_table, rows.block_table.stride(0), rows.stop_ids,
        CHUNKS=chunks, CHUNKS_PAD=triton.next_power_of_2(chunks), CHUNK=_CHUNK, EXACT=exact,
        STOPS=rows.stop_ids.shape[1], BLOCK_SIZE=block_size, CAPACITY=rows.tokens_out.shape[1],
        num_warps=_SAMPLE_WARPS,
    )  # fmt: skip


def log_probs_of(logits: Tensor, tokens: Tensor, inverse_temperature: Tensor) -> Tensor:
    """Returns log p of one token per row."""
    count, vocabulary = logits.shape
    out = torch.empty(count, dtype=torch.float32, device=logits.device)
    max_logit, exp_sum, _ = _statistics(logits, inverse_temperature)
    _log_prob_at[(count,)](
        logits, inverse_temperature, tokens, _exact_log_norm(max_logit, exp_sum), out, vocabulary,
        CHUNK=_CHUNK, num_warps=_SAMPLE_WARPS,
    )  # fmt: skip
    return out


def _statistics(logits: Tensor, inverse_temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    count, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, _CHUNK)
    max_logit = torch.empty(count, chunks, dtype=torch.float32, device=logits.device)
    exp_sum = torch.empty_like(max_logit)
    best = torch.empty(count, chunks, dtype=torch.int32, device=logits.device)
    _logit_stats[(count, chunks)](
        logits, inverse_temperature, max_logit, exp_sum, best, vocabulary,
        CHUNKS=chunks, CHUNK=_CHUNK, num_warps=_STATS_WARPS,
    )  # fmt: skip
    return max_logit, exp_sum, best


def _exact_log_norm(max_logit: Tensor, exp_sum: Tensor) -> Tensor:
    count, chunks = max_logit.shape
    log_norm = torch.empty(count, dtype=torch.float32, device=max_logit.device)
    _log_norm[(count,)](
        max_logit, exp_sum, log_norm, CHUNKS=chunks, CHUNKS_PAD=triton.next_power_of_2(chunks),
        num_warps=1,
    )  # fmt: skip
    return log_norm


@triton.jit
def _advance_rows(  # type: ignore[no-untyped-def]
    token_ptr, new_log_prob_ptr, state_ptr, state_stride, log_prob_ptr, token_out_ptr, table_ptr,
    table_stride, stops_ptr,
    STOPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    _advance(
        row, tl.load(token_ptr + row), tl.load(new_log_prob_ptr + row), state_ptr, state_stride,
        log_prob_ptr, token_out_ptr, table_ptr, table_stride, stops_ptr, STOPS, BLOCK_SIZE, CAPACITY,
    )  # fmt: skip


def advance(tokens: Tensor, log_probs: Tensor, rows: BatchState, block_size: int) -> None:
    _advance_rows[(tokens.shape[0],)](
        tokens, log_probs, rows.state, rows.state.stride(0), rows.log_probs_out, rows.tokens_out,
        rows.block_table, rows.block_table.stride(0), rows.stop_ids,
        STOPS=rows.stop_ids.shape[1], BLOCK_SIZE=block_size, CAPACITY=rows.tokens_out.shape[1],
        num_warps=1,
    )  # fmt: skip
