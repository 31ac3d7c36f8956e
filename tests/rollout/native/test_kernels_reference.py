"""The reference kernels against float64 formulas, row by row."""

from __future__ import annotations

import cmath
import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from hone.ops.attention import AttentionOptions
from hone.ops.counter_rng import uniform
from hone.rollout.native import exact_reference, kernels_reference
from hone.rollout.native.decode_step import BatchState
from hone.rollout.native.kernels_reference import RotaryTable
from hone.rollout.native.paged_cache import PagedCache

from .attention import HEAD_DIM, HEADS, KV_HEADS, OPTIONS, assert_close, qkv, reference

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def paged_cache(num_blocks: int = 16) -> PagedCache:
    cache = PagedCache(
        num_layers=2, kv_heads=KV_HEADS, head_dim=HEAD_DIM, num_blocks=num_blocks,
        block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU,
    )  # fmt: skip
    cache.reserve()
    return cache


def slots_of(blocks: list[int], length: int) -> Tensor:
    """The slots of the first `length` positions of a sequence."""
    position = torch.arange(length)
    return torch.tensor(blocks)[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


def batch(num_rows: int, **state: list[int]) -> BatchState:
    rows = BatchState.empty(num_rows, 8, 6, CPU)
    rows.finished.zero_()
    rows.max_length.fill_(100)
    for name, values in state.items():
        getattr(rows, name).copy_(torch.tensor(values))
    return rows


def test_the_kernels_of_a_cpu_are_the_references() -> None:
    assert kernels_reference.kernels_for(CPU) is kernels_reference
    assert kernels_reference.kernels_for(CPU, exact=True) is exact_reference


@pytest.mark.parametrize("has_residual", [False, True])
def test_the_sum_is_normalized_and_returned(has_residual: bool) -> None:
    x, weight = torch.randn(3, 8), torch.rand(8)
    residual = torch.randn(3, 8) if has_residual else None
    normed, total = kernels_reference.add_rms_norm(x, residual, weight, 1e-3)
    expected_total = x.double() + (0 if residual is None else residual.double())
    for row, values in enumerate(expected_total.tolist()):
        scale = math.sqrt(sum(v * v for v in values) / 8 + 1e-3)
        expected = torch.tensor(values, dtype=torch.float64) / scale * weight
        assert_close(normed[row], expected)
    assert_close(total, expected_total)


def test_the_norm_of_bfloat16_keeps_its_sum_in_float32() -> None:
    x, residual = torch.randn(3, 8).bfloat16(), torch.randn(3, 8)
    normed, total = kernels_reference.add_rms_norm(x, residual, torch.ones(8).bfloat16(), 1e-6)
    assert (normed.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(total, x.float() + residual)


def test_the_gate_is_silu_times_up() -> None:
    gate_up = torch.randn(2, 6)
    out = kernels_reference.silu_mul(gate_up)
    for row, values in enumerate(gate_up.tolist()):
        expected = [g / (1 + math.exp(-g)) * u for g, u in zip(values[:3], values[3:], strict=True)]
        assert_close(out[row], torch.tensor(expected, dtype=torch.float64))


def test_queries_and_keys_turn_by_their_position_and_go_into_their_slots() -> None:
    cache, frequencies = paged_cache(), torch.tensor([1.0, 0.5, 0.1, 0.01])
    angles = torch.arange(40)[:, None] * torch.cat([frequencies, frequencies])
    packed = torch.randn(3, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    positions, slots = torch.tensor([0, 7, 31]), torch.tensor([5, 18, 63])
    q, k, v = kernels_reference.rope_store(
        packed,
        RotaryTable(angles.cos(), angles.sin()),
        positions,
        slots,
        cache,
        1,
        return_keys=True,
    )
    heads = packed.view(3, -1, HEAD_DIM)
    for row, position in enumerate(positions.tolist()):
        for out, source in ((q, heads[:, :HEADS]), (k, heads[:, HEADS : HEADS + KV_HEADS])):
            for head in range(out.shape[1]):
                for i, frequency in enumerate(frequencies.tolist()):
                    pair = complex(source[row, head, i], source[row, head, i + HEAD_DIM // 2])
                    turned = pair * cmath.exp(1j * position * frequency)
                    assert out[row, head, i] == pytest.approx(turned.real, abs=1e-5)
                    assert out[row, head, i + HEAD_DIM // 2] == pytest.approx(turned.imag, abs=1e-5)
    keys, values = cache.layer(1)
    for row, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, BLOCK_SIZE)
        assert torch.equal(keys[block, :, offset], k[row])
        assert torch.equal(values[block, :, offset], v[row])
    assert not cache.layer(0)[0].any()


@pytest.mark.parametrize("options", OPTIONS)
def test_a_query_attends_to_the_blocks_of_its_row(options: AttentionOptions) -> None:
    cache, lengths, blocks = paged_cache(), [6, 1, 9], [[3, 7, 0], [5, 0, 0], [1, 2, 9]]
    sequences = [qkv(length) for length in lengths]
    for (_, k, v), row_blocks in zip(sequences, blocks, strict=True):
        kernels_reference.store_kv(k, v, slots_of(row_blocks, len(k)), cache, options.layer)
    q = torch.stack([sequence[0][-1] for sequence in sequences])
    positions = torch.tensor(lengths) - 1
    out = kernels_reference.decode_attention(
        q, cache, torch.tensor(blocks), positions, options, splits=1
    )
    for row, (_, k, v) in enumerate(sequences):
        assert_close(out[row : row + 1], reference(q[row : row + 1], k, v, options))


def test_a_row_samples_by_its_seed_and_position_alone() -> None:
    logits = torch.randn(3, 10)
    rows = batch(3, seed=[5, 6, 7], position=[3, 8, 2])
    kernels_reference.sample(logits, rows, BLOCK_SIZE)
    for row in range(3):
        alone = batch(1, seed=[5 + row], position=[[3, 8, 2][row]])
        kernels_reference.sample(logits[row : row + 1], alone, BLOCK_SIZE)
        assert alone.tokens_out[0, 0] == rows.tokens_out[row, 0]
    token = rows.tokens_out[:, 0].long()
    expected = torch.log_softmax(logits.double(), -1).gather(-1, token[:, None])[:, 0]
    assert_close(rows.log_probs_out[:, 0], expected)


def test_a_draw_belongs_to_the_position_that_the_token_gets() -> None:
    rows, logits = batch(50, seed=list(range(50)), position=[4] * 50), torch.randn(10)
    kernels_reference.sample(logits.expand(50, 10), rows, BLOCK_SIZE)
    for seed, token in enumerate(rows.tokens_out[:, 0].tolist()):
        draw = float(uniform(torch.tensor(seed), torch.tensor(5)))
        p = torch.softmax(logits.double(), -1).cumsum(0)
        assert token == int((p <= draw).sum())


def test_tokens_are_drawn_with_their_probability() -> None:
    draws, p = 20_000, torch.tensor([0.5, 0.3, 0.15, 0.05])
    rows = batch(draws, seed=list(range(draws)))
    kernels_reference.sample(p.log().expand(draws, 4), rows, BLOCK_SIZE)
    counts = Counter(rows.tokens_out[:, 0].tolist())
    for token, probability in enumerate(p.tolist()):
        deviation = math.sqrt(probability * (1 - probability) / draws)
        assert counts[token] / draws == pytest.approx(probability, abs=5 * deviation)


def test_a_greedy_row_takes_the_largest_logit_and_a_temperature_scales() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
    rows = batch(2)
    rows.greedy[0] = 1
    rows.inverse_temperature[1] = 2.0
    kernels_reference.sample(logits, rows, BLOCK_SIZE)
    assert rows.tokens_out[0, 0] == 1
    token = int(rows.tokens_out[1, 0])
    expected = math.log(math.exp(2 * logits[1, token]) / (1 + math.exp(4) + math.exp(2)))
    assert rows.log_probs_out[1, 0] == pytest.approx(expected, abs=1e-6)


def test_an_advanced_row_has_its_next_token_position_and_slot() -> None:
    rows = batch(1, position=[3], slot=[3 + 4 * 2])
    rows.block_table[0, :2] = torch.tensor([2, 9])
    kernels_reference.advance(torch.tensor([7]), torch.tensor([-0.5]), rows, BLOCK_SIZE)
    assert rows.token.tolist() == [7]
    assert rows.position.tolist() == [4]
    assert rows.slot.tolist() == [9 * BLOCK_SIZE]  # the first slot of its second block
    assert (rows.finished.tolist(), rows.num_sampled.tolist()) == ([0], [1])


def test_a_row_ends_at_a_stop_token_or_its_length_and_keeps_the_token() -> None:
    rows = batch(3, position=[3, 3, 3], max_length=[100, 5, 6])
    rows.stop_ids[0, 1] = 7
    kernels_reference.advance(torch.tensor([7, 8, 9]), torch.zeros(3), rows, BLOCK_SIZE)
    assert rows.finished.tolist() == [1, 1, 0]
    assert rows.tokens_out[:, 0].tolist() == [7, 8, 9]
    before = rows.state.clone()
    kernels_reference.advance(torch.tensor([1, 2, 3]), torch.zeros(3), rows, BLOCK_SIZE)
    assert torch.equal(rows.state[:, :2], before[:, :2])  # finished rows are unchanged
    assert rows.num_sampled.tolist() == [1, 1, 2]
    assert rows.tokens_out[2, :2].tolist() == [9, 3]
