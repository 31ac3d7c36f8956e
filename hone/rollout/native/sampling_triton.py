"""The GPU sampling kernels of the native engine: two passes give a token and its log-probability.

The first pass reads all logits in chunks; the second reads only the chunk that contains the token.
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
_STATS_WARPS, _PICK_WARPS = 4, 8


@triton.jit
def _logit_stats(  # type: ignore[no-untyped-def]
    logits_ptr, inverse_temperature_ptr, top_ptr, mass_ptr, best_ptr, vocabulary,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    z = tl.load(logits_ptr + row * vocabulary + i, i < vocabulary, other=float("-inf"))
    z = z.to(tl.float32) * tl.load(inverse_temperature_ptr + row)
    z = tl.where(i < vocabulary, z, float("-inf"))
    top = tl.max(z, 0)
    at = row * CHUNKS + chunk
    tl.store(top_ptr + at, top)
    tl.store(mass_ptr + at, tl.sum(tl.exp(z - top), 0))
    tl.store(best_ptr + at, chunk * CHUNK + tl.argmax(z, 0))


@triton.jit
def _log_norm(  # type: ignore[no-untyped-def]
    top_ptr, mass_ptr, norm_ptr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS_PAD)
    tops = tl.load(top_ptr + row * CHUNKS + c, c < CHUNKS, other=float("-inf"))
    masses = tl.load(mass_ptr + row * CHUNKS + c, c < CHUNKS, other=0.0)
    top = tl.max(tops, 0)
    tl.store(norm_ptr + row, top + tl.log(tl.sum(masses * tl.exp(tops - top), 0)))


@triton.jit
def _log_prob_at(  # type: ignore[no-untyped-def]
    logits_ptr, inverse_temperature_ptr, token_ptr, norm_ptr, out_ptr, vocabulary,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ptr + row)
    i = tl.arange(0, CHUNK)
    at = token // CHUNK * CHUNK + i
    z = tl.load(logits_ptr + row * vocabulary + at, at < vocabulary, other=float("-inf"))
    z = z.to(tl.float32) * tl.load(inverse_temperature_ptr + row)
    # Summed as in `_pick`: the compiler could fuse a product and a difference into one rounding.
    logit = tl.sum(tl.where(at == token, z, 0.0), 0)
    tl.store(out_ptr + row, logit - tl.load(norm_ptr + row))


@triton.jit
def _mix64(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _advance(  # type: ignore[no-untyped-def]
    row, token, log_prob, state_ptr, state_stride, log_prob_ptr, token_out_ptr, table_ptr,
    table_stride, stops_ptr,
    STOPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROOM: tl.constexpr,
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
    tl.store(token_out_ptr + row * ROOM + count, token, running)
    tl.store(log_prob_ptr + row * ROOM + count, log_prob, running)
    tl.store(state_ptr + 6 * state_stride + row, count + 1, running)
    tl.store(state_ptr + 5 * state_stride + row, finished.to(tl.int64), running)
    moving = running & (not finished)
    entry = table_ptr + row * table_stride + position // BLOCK_SIZE
    block = tl.load(entry, moving, other=0).to(tl.int64)
    tl.store(state_ptr + row, token, moving)
    tl.store(state_ptr + 1 * state_stride + row, position, moving)
    tl.store(state_ptr + 2 * state_stride + row, block * BLOCK_SIZE + position % BLOCK_SIZE, moving)


@triton.jit
def _pick(  # type: ignore[no-untyped-def]
    logits_ptr, inverse_temperature_ptr, greedy_ptr, top_ptr, mass_ptr, best_ptr, norm_ptr,
    vocabulary, state_ptr, state_stride, log_prob_ptr, token_out_ptr, table_ptr, table_stride,
    stops_ptr,
    CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, CHUNK: tl.constexpr, GIVEN_NORM: tl.constexpr,
    STOPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS_PAD)
    tops = tl.load(top_ptr + row * CHUNKS + c, c < CHUNKS, other=float("-inf"))
    masses = tl.load(mass_ptr + row * CHUNKS + c, c < CHUNKS, other=0.0)
    top = tl.max(tops, 0)
    weight = masses * tl.exp(tops - top)
    total = tl.sum(weight, 0)
    if GIVEN_NORM:
        norm = tl.load(norm_ptr + row)
    else:
        norm = top + tl.log(total)
    position = tl.load(state_ptr + 1 * state_stride + row)
    seed = tl.load(state_ptr + 3 * state_stride + row).to(tl.uint64, bitcast=True)
    golden: tl.constexpr = 0x9E3779B97F4A7C15
    bits = _mix64(_mix64(seed + golden) + (position + 1).to(tl.uint64, bitcast=True) * golden)
    uniform = (bits >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)
    threshold = (uniform * total.to(tl.float64)).to(tl.float32)
    # Finds the chunk where the cumulative mass exceeds the threshold, then the token in the chunk.
    before = tl.cumsum(weight, 0)
    last = tl.max(tl.where(weight > 0, c, 0), 0)
    chunk = tl.minimum(tl.sum((before <= threshold).to(tl.int32), 0), last)
    here = tl.sum(tl.where(c == chunk, before - weight, 0.0), 0)
    i = tl.arange(0, CHUNK)
    at = chunk * CHUNK + i
    z = tl.load(logits_ptr + row * vocabulary + at, at < vocabulary, other=float("-inf"))
    z = z.to(tl.float32) * tl.load(inverse_temperature_ptr + row)
    p = tl.where(at < vocabulary, tl.exp(z - top), 0.0)
    inside = tl.cumsum(p, 0)
    final = tl.max(tl.where(p > 0, i, 0), 0)
    offset = tl.minimum(tl.sum((inside <= threshold - here).to(tl.int32), 0), final)
    log_prob = tl.sum(tl.where(i == offset, z, 0.0), 0) - norm
    token = (chunk * CHUNK + offset).to(tl.int64)
    if tl.load(greedy_ptr + row) != 0:
        winner = tl.argmax(tops, 0)
        token = tl.load(best_ptr + row * CHUNKS + winner).to(tl.int64)
        log_prob = top - norm
    _advance(
        row, token, log_prob, state_ptr, state_stride, log_prob_ptr, token_out_ptr, table_ptr,
        table_stride, stops_ptr, STOPS, BLOCK_SIZE, ROOM,
    )  # fmt: skip


def sample(logits: Tensor, rows: BatchState, block_size: int, *, exact: bool = False) -> None:
    """Samples one token per row; `exact` uses the trainer's kernel for the log-norm."""
    count, vocabulary = logits.shape
    top, mass, best = _statistics(logits, rows.inverse_temperature)
    chunks = top.shape[1]
    norm = _norm(top, mass) if exact else top
    _pick[(count,)](
        logits, rows.inverse_temperature, rows.greedy, top, mass, best, norm, vocabulary,
        rows.state, rows.state.stride(0), rows.log_probs_out, rows.tokens_out,
        rows.block_table, rows.block_table.stride(0), rows.stop_ids,
        CHUNKS=chunks, CHUNKS_PAD=triton.next_power_of_2(chunks), CHUNK=_CHUNK, GIVEN_NORM=exact,
        STOPS=rows.stop_ids.shape[1], BLOCK_SIZE=block_size, ROOM=rows.tokens_out.shape[1],
        num_warps=_PICK_WARPS,
    )  # fmt: skip


def log_probs_of(logits: Tensor, tokens: Tensor, inverse_temperature: Tensor) -> Tensor:
    """Returns log p of one token per row, bitwise equal to an exact `sample`."""
    count, vocabulary = logits.shape
    out = torch.empty(count, dtype=torch.float32, device=logits.device)
    top, mass, _ = _statistics(logits, inverse_temperature)
    _log_prob_at[(count,)](
        logits, inverse_temperature, tokens, _norm(top, mass), out, vocabulary, CHUNK=_CHUNK,
        num_warps=_PICK_WARPS,
    )  # fmt: skip
    return out


def _statistics(logits: Tensor, inverse_temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    count, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, _CHUNK)
    top = torch.empty(count, chunks, dtype=torch.float32, device=logits.device)
    mass = torch.empty_like(top)
    best = torch.empty(count, chunks, dtype=torch.int32, device=logits.device)
    _logit_stats[(count, chunks)](
        logits, inverse_temperature, top, mass, best, vocabulary,
        CHUNKS=chunks, CHUNK=_CHUNK, num_warps=_STATS_WARPS,
    )  # fmt: skip
    return top, mass, best


def _norm(top: Tensor, mass: Tensor) -> Tensor:
    count, chunks = top.shape
    norm = torch.empty(count, dtype=torch.float32, device=top.device)
    _log_norm[(count,)](
        top, mass, norm, CHUNKS=chunks, CHUNKS_PAD=triton.next_power_of_2(chunks), num_warps=1
    )
    return norm


@triton.jit
def _advance_rows(  # type: ignore[no-untyped-def]
    token_ptr, new_log_prob_ptr, state_ptr, state_stride, log_prob_ptr, token_out_ptr, table_ptr,
    table_stride, stops_ptr,
    STOPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    _advance(
        row, tl.load(token_ptr + row), tl.load(new_log_prob_ptr + row), state_ptr, state_stride,
        log_prob_ptr, token_out_ptr, table_ptr, table_stride, stops_ptr, STOPS, BLOCK_SIZE, ROOM,
    )  # fmt: skip


def advance(tokens: Tensor, log_probs: Tensor, rows: BatchState, block_size: int) -> None:
    _advance_rows[(tokens.shape[0],)](
        tokens, log_probs, rows.state, rows.state.stride(0), rows.log_probs_out, rows.tokens_out,
        rows.block_table, rows.block_table.stride(0), rows.stop_ids,
        STOPS=rows.stop_ids.shape[1], BLOCK_SIZE=block_size, ROOM=rows.tokens_out.shape[1], num_warps=1,
    )  # fmt: skip
