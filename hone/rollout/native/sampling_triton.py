"""The GPU sampling kernels of the native engine.

A first pass reads all logits in chunks; a second pass reads only the chunk of the sampled token.
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

_CHUNK_LOGITS = 4096
"""Logits per program of the first pass."""
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
    """Writes one sampled token and advances its row, unless the row is finished."""
    # The factors of state_stride are indices in STATE_FIELDS of batch_state.py.
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


def sample(logits: Tensor, rows: BatchState, block_size: int, *, exact: bool = False) -> None:
    """Samples one token per row; with `exact`, log-probs equal those of `token_log_probs`."""
    num_rows, vocab_size = logits.shape
    max_logit, exp_sum, argmax = _chunk_statistics(logits, rows.inverse_temperature)
    chunks = max_logit.shape[1]
    lse = _exact_logsumexp(max_logit, exp_sum) if exact else max_logit
    _sample[(num_rows,)](
        logits, rows.inverse_temperature, rows.greedy, max_logit, exp_sum, argmax, lse, vocab_size,
        rows.state, rows.state.stride(0), rows.log_probs_out, rows.tokens_out,
        rows.block_table, rows.block_table.stride(0), rows.stop_ids,
        CHUNKS=chunks, CHUNKS_PAD=triton.next_power_of_2(chunks), CHUNK=_CHUNK_LOGITS, EXACT=exact,
        NUM_STOP_IDS=rows.stop_ids.shape[1], BLOCK_SIZE=block_size,
        CAPACITY=rows.tokens_out.shape[1], num_warps=_SAMPLE_WARPS,
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


def advance(tokens: Tensor, log_probs: Tensor, rows: BatchState, block_size: int) -> None:
    _advance_rows[(tokens.shape[0],)](
        tokens, log_probs, rows.state, rows.state.stride(0), rows.log_probs_out, rows.tokens_out,
        rows.block_table, rows.block_table.stride(0), rows.stop_ids,
        NUM_STOP_IDS=rows.stop_ids.shape[1], BLOCK_SIZE=block_size,
        CAPACITY=rows.tokens_out.shape[1], num_warps=1,
    )  # fmt: skip
