"""The map between Hugging Face tensors and megatron-core's parameters is lossless."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hone.engine.megatron.weights import ModelSizes, to_full, to_local

SHAPE = ModelSizes(vocab_size=41, kv_heads=2, head_dim=4)
WIDTH = 8
WHOLE = {
    "same": [(WIDTH,)],
    "columns": [(WIDTH, 12)],
    "vocabulary": [(41, WIDTH)],
    "qkv": [(16, WIDTH), (8, WIDTH), (8, WIDTH)],
    "gate_up": [(12, WIDTH), (12, WIDTH)],
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", WHOLE)
def test_the_parts_of_all_ranks_join_to_the_whole(kind, ranks):
    tensors = [torch.randn(shape) for shape in WHOLE[kind]]
    parts = [to_local(kind, tensors, SHAPE, rank, ranks) for rank in range(ranks)]
    joined = to_full(kind, parts, SHAPE)
    assert [x.shape for x in joined] == [x.shape for x in tensors]
    assert all(torch.equal(x, y) for x, y in zip(joined, tensors, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("expert_parallel_size", [1, 2])
@pytest.mark.parametrize(
    ("kind", "size"), [("experts_gate_up", (24, 8)), ("experts_down", (8, 12))]
)
def test_the_parts_of_experts_join_to_the_whole(kind, size, expert_parallel_size, ranks):
    ranks = max(ranks, expert_parallel_size)
    shape = replace(SHAPE, expert_parallel_size=expert_parallel_size)
    experts = torch.randn(4, *size)
    parts = [to_local(kind, [experts], shape, rank, ranks) for rank in range(ranks)]
    assert {len(part) for part in parts} == {4 // expert_parallel_size}
    (joined,) = to_full(kind, parts, shape)
    assert torch.equal(joined, experts)


def test_a_rank_of_an_expert_holds_the_same_rows_of_gate_and_up():
    shape = replace(SHAPE, expert_parallel_size=2)
    experts = torch.arange(4.0)[:, None, None] * 100 + torch.arange(8.0)[:, None].expand(8, 2)
    last = to_local("experts_gate_up", [experts], shape, 3, 4)  # experts 2 and 3, second half
    assert last[:, :, 0].tolist() == [[202, 203, 206, 207], [302, 303, 306, 307]]


def test_a_bias_of_the_attention_is_mapped_like_its_weight():
    tensors = [torch.randn(n) for n in (16, 8, 8)]
    parts = [to_local("qkv", tensors, SHAPE, rank, 2) for rank in range(2)]
    assert all(map(torch.equal, to_full("qkv", parts, SHAPE), tensors))


def test_the_queries_of_a_key_value_head_precede_its_key_and_value():
    queries, key, value = torch.arange(16.0), torch.full((8,), 100.0), torch.full((8,), 200.0)
    first = to_local("qkv", [queries, key, value], SHAPE, 0, 2)
    assert first.tolist() == [*range(8), *[100.0] * 4, *[200.0] * 4]


def test_a_vocabulary_is_padded_to_the_ranks():
    last = to_local("vocabulary", [torch.ones(41, WIDTH)], SHAPE, 1, 2)
    assert last.shape == (21, WIDTH)
    assert last[-1].eq(0).all()
