"""Each Triton kernel of the engine against its torch reference, on fresh random inputs."""

from __future__ import annotations

import random

import pytest
import torch

from hone.ops.attention import AttentionOptions
from hone.rollout.contract import Sampling
from hone.rollout.native import kernels_reference as reference
from hone.rollout.native.decode_step import STATE_FIELDS, BatchState
from hone.rollout.native.paged_cache import PagedCache
from hone.rollout.native.sampler import TruncatedSampling

from .device import DEVICE, INTERPRETED, needs_kernels, relative_error

pytestmark = needs_kernels
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter cannot multiply bfloat16
TOLERANCE = {torch.float32: 1e-5, HALF: 1e-2}
DTYPES = [torch.float32, HALF]
SHAPES = [(14, 2, 64), (9, 3, 64), (4, 4, 32), (12, 2, 128), (8, 2, 80)]
"""(heads, key heads, head width): Qwen2.5, SmolLM2, no grouping, 1.5B, a width that is no power of two."""


def cache_of(kv_heads: int, head_dim: int, dtype: torch.dtype, blocks: int = 40) -> PagedCache:
    cache = PagedCache(
        num_layers=2, kv_heads=kv_heads, head_dim=head_dim, num_blocks=blocks, block_size=16, dtype=dtype,
        device=DEVICE,
    )  # fmt: skip
    cache.reserve()
    assert cache._memory is not None
    cache._memory.normal_()
    return cache


def random_table(rows: int, width: int, blocks: int = 40) -> torch.Tensor:
    return torch.randint(1, blocks, (rows, width), dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [896, 576, 100])
def test_the_norm_of_a_sum_equals_its_reference(dtype: torch.dtype, width: int) -> None:
    from hone.rollout.native import kernels_triton

    x, residual = torch.randn(2, 7, width, device=DEVICE).to(dtype)
    weight = torch.randn(width, device=DEVICE).to(dtype)
    for other in (None, residual):
        expected = reference.add_rms_norm(x, other, weight, 1e-6)
        actual = kernels_triton.add_rms_norm(x, other, weight, 1e-6)
        for a, b in zip(actual, expected, strict=True):
            assert relative_error(a, b) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_equals_its_reference(dtype: torch.dtype) -> None:
    from hone.rollout.native import kernels_triton

    x = torch.randn(5, 2 * 1500, device=DEVICE).to(dtype)
    assert relative_error(kernels_triton.silu_mul(x), reference.silu_mul(x)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_rotation_and_cache_write_equal_their_reference(
    dtype: torch.dtype, normed: bool, shape: tuple[int, int, int]
) -> None:
    from hone.rollout.native import kernels_triton

    heads, kv, d = shape
    tokens = 6
    qkv = torch.randn(tokens, (heads + 2 * kv) * d, device=DEVICE).to(dtype)
    cos, sin = torch.randn(2, 50, d, device=DEVICE).to(dtype)
    positions = torch.randint(0, 50, (tokens,), device=DEVICE)
    slots = torch.randperm(39 * 16, device=DEVICE)[:tokens] + 16
    norms = torch.randn(2, d, device=DEVICE).to(dtype) if normed else (None, None)
    caches = [cache_of(kv, d, dtype), cache_of(kv, d, dtype)]
    caches[1]._memory.copy_(caches[0]._memory)
    rotary = reference.RotaryTable(cos, sin, *norms, 1e-6)
    outs = [
        module.rope_store(qkv, rotary, positions, slots, cache, 1, return_keys=True)
        for module, cache in zip((kernels_triton, reference), caches, strict=True)
    ]
    for a, b in zip(*outs, strict=True):
        assert relative_error(a, b) < TOLERANCE[dtype]
    assert relative_error(caches[0]._memory, caches[1]._memory) < TOLERANCE[dtype]
    assert torch.equal(caches[0]._memory[0], caches[1]._memory[0])


def test_a_cache_write_changes_only_its_cells() -> None:
    from hone.rollout.native import kernels_triton

    k, v = torch.randn(2, 1, 3, 5, 64, device=DEVICE)[:, 0].transpose(1, 2)  # strided heads
    slots = torch.tensor([17, 200, 33, 18, 500], device=DEVICE)
    caches = [cache_of(3, 64, torch.float32), cache_of(3, 64, torch.float32)]
    caches[1]._memory.copy_(caches[0]._memory)
    kernels_triton.store_kv(k, v, slots, caches[0], 1)
    reference.store_kv(k, v, slots, caches[1], 1)
    assert torch.equal(caches[0]._memory, caches[1]._memory)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("splits", "window"), [(1, None), (4, None), (1, 20), (2, 20)])
def test_paged_attention_equals_its_reference(
    dtype: torch.dtype, shape: tuple[int, int, int], splits: int, window: int | None
) -> None:
    from hone.rollout.native import attention_triton

    heads, kv, d = shape
    lengths = [1, 15, 16, 17, 64, 65, random.randint(1, 300), random.randint(1, 300)]
    cache = cache_of(kv, d, dtype)
    table = random_table(len(lengths), 20)
    positions = torch.tensor(lengths, device=DEVICE) - 1
    q = torch.randn(len(lengths), heads, d, device=DEVICE).to(dtype)
    options = AttentionOptions(1, d**-0.5, window)
    actual = attention_triton.decode_attention(q, cache, table, positions, options, splits=splits)
    expected = reference.decode_attention(q, cache, table, positions, options, splits=splits)
    assert relative_error(actual, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("splits", "window"), [(1, None), (4, None), (2, 20)])
@pytest.mark.parametrize(("softcap", "sinks"), [(2.0, False), (None, True), (2.0, True)])
def test_capped_scores_and_sinks_equal_their_reference(
    dtype: torch.dtype, splits: int, window: int | None, softcap: float | None, sinks: bool
) -> None:
    from hone.rollout.native import attention_triton

    heads, kv, d = 9, 3, 64
    lengths = [1, 15, 16, 65, random.randint(1, 200)]
    cache, table = cache_of(kv, d, dtype), random_table(len(lengths), 13)
    positions = torch.tensor(lengths, device=DEVICE) - 1
    q = 3 * torch.randn(len(lengths), heads, d, device=DEVICE).to(dtype)
    logits = 2 * torch.randn(heads, device=DEVICE).to(dtype) if sinks else None
    options = AttentionOptions(1, d**-0.5, window, softcap, logits)
    actual = attention_triton.decode_attention(q, cache, table, positions, options, splits=splits)
    expected = reference.decode_attention(q, cache, table, positions, options, splits=splits)
    assert relative_error(actual, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("splits", "window"), [(1, None), (4, None), (1, 20), (2, 20)])
def test_rotation_within_attention_equals_its_reference(
    dtype: torch.dtype,
    normed: bool,
    shape: tuple[int, int, int],
    splits: int,
    window: int | None,
) -> None:
    """The new keys are written by the kernel that reads them: every row has its own last block."""
    from hone.rollout.native import attention_triton

    heads, kv, d = shape
    lengths = [1, 15, 16, 17, 64, 65, random.randint(1, 200), random.randint(1, 200)]
    blocks = len(lengths) * 13 + 1
    table = (torch.randperm(blocks - 1, device=DEVICE) + 1).int().view(len(lengths), 13)
    positions = torch.tensor(lengths, device=DEVICE) - 1
    block = table.gather(1, (positions // 16)[:, None]).long()[:, 0]
    slots = block * 16 + positions % 16
    caches = [cache_of(kv, d, dtype, blocks) for _ in range(2)]
    caches[1]._memory.copy_(caches[0]._memory)
    qkv = torch.randn(len(lengths), (heads + 2 * kv) * d, device=DEVICE).to(dtype)
    angle = torch.randn(200, d // 2, device=DEVICE).repeat(1, 2)
    norms = torch.randn(2, d, device=DEVICE).to(dtype) if normed else (None, None)
    rotary = reference.RotaryTable(angle.cos().to(dtype), angle.sin().to(dtype), *norms, 1e-6)
    actual, expected = (
        module.rope_attention(
            qkv, rotary, positions, slots, cache, table, AttentionOptions(1, d**-0.5, window),
            splits=splits,
        )
        for module, cache in zip((attention_triton, reference), caches, strict=True)
    )  # fmt: skip
    assert relative_error(actual, expected) < TOLERANCE[dtype]
    written = caches[0]._memory[1].transpose(2, 3).flatten(1, 2)[:, slots]
    expected = caches[1]._memory[1].transpose(2, 3).flatten(1, 2)[:, slots]
    assert relative_error(written, expected) < TOLERANCE[dtype]
    for cache in caches:
        cache._memory[1, :, block, :, positions % 16] = 0
    assert torch.equal(caches[0]._memory, caches[1]._memory)  # nothing else was touched


def rows_of(count: int, vocabulary: int) -> BatchState:
    rows = BatchState.empty(count, 20, 5, DEVICE)
    table = {
        "token": [0] * count,
        "position": random.choices(range(100), k=count),
        "slot": [0] * count,
        "seed": random.choices(range(2**62), k=count),
        "max_length": random.choices([40, 120, 300], k=count),
        "finished": random.choices([0, 0, 0, 1], k=count),
        "num_sampled": random.choices([0, 1, 2], k=count),
    }
    rows.state.copy_(torch.tensor([table[name] for name in STATE_FIELDS]))
    rows.inverse_temperature.copy_(torch.rand(count) * 2 + 0.2)
    rows.greedy.copy_(torch.tensor(random.choices([0, 0, 1], k=count)))
    rows.stop_ids[:, 0] = torch.randint(0, vocabulary, (count,))
    rows.block_table.copy_(random_table(count, 20))
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [24, 5000, 9000])
def test_sampling_equals_its_reference(dtype: torch.dtype, vocabulary: int) -> None:
    """Sums of other order may move a draw to the neighbouring token, rarely; never further."""
    from hone.rollout.native import kernels_triton

    count = 64
    logits = (torch.randn(count, vocabulary, device=DEVICE) * 3).to(dtype)
    actual_state, expected = [rows_of(count, vocabulary) for _ in range(2)]
    for name in ("state", "inverse_temperature", "greedy", "stop_ids", "block_table"):
        getattr(actual_state, name).copy_(getattr(expected, name))
    kernels_triton.sample(logits, actual_state, 16)
    reference.sample(logits, expected, 16)
    differ = (actual_state.tokens_out != expected.tokens_out).any(1)
    assert int(differ.sum()) <= 1
    same = ~differ
    assert torch.equal(actual_state.state[:, same], expected.state[:, same])
    assert torch.allclose(actual_state.log_probs_out[same], expected.log_probs_out[same], atol=1e-4)


def test_an_impossible_token_is_never_sampled() -> None:
    from hone.rollout.native import kernels_triton

    logits = torch.full((64, 9000), float("-inf"), device=DEVICE)
    logits[:, [3, 4100, 8999]] = torch.randn(64, 3, device=DEVICE)
    rows = BatchState.empty(64, 20, 5, DEVICE)
    rows.state[3] = torch.arange(64)
    rows.state[4] = 100
    rows.state[5] = 0
    kernels_triton.sample(logits, rows, 16)
    assert set(rows.tokens_out[:, 0].tolist()) == {3, 4100, 8999}


def test_advance_equals_its_reference() -> None:
    from hone.rollout.native import kernels_triton

    actual_state, expected = [rows_of(64, 30) for _ in range(2)]
    for name in ("state", "stop_ids", "block_table"):
        getattr(actual_state, name).copy_(getattr(expected, name))
    tokens, log_probs = torch.randint(0, 30, (64,), device=DEVICE), torch.randn(64, device=DEVICE)
    kernels_triton.advance(tokens, log_probs, actual_state, 16)
    reference.advance(tokens, log_probs, expected, 16)
    assert torch.equal(actual_state.state, expected.state)
    assert torch.equal(actual_state.tokens_out, expected.tokens_out)
    assert torch.equal(actual_state.log_probs_out, expected.log_probs_out)


@pytest.mark.parametrize("vocabulary", [24, 9000])
def test_top_k_of_some_rows_does_not_change_the_others(vocabulary: int) -> None:
    from hone.rollout.native import kernels_triton

    random.seed(vocabulary)
    alone, mixed = [rows_of(32, vocabulary) for _ in range(2)]
    for name in ("state", "inverse_temperature", "greedy", "stop_ids", "block_table"):
        getattr(mixed, name).copy_(getattr(alone, name))
    was_running = alone.finished == 0
    logits = torch.randn(32, vocabulary, device=DEVICE) * 3
    logits[:, 0] = -9.0  # token 0 is never sampled, so a 0 was not written
    requests = [Sampling(5, 1.0, i, **({"top_k": 1} if i % 4 == 0 else {})) for i in range(32)]
    truncated = TruncatedSampling.of(requests, DEVICE, exact=False)
    assert truncated is not None
    truncated.sample(logits, mixed, kernels_triton, 16)
    kernels_triton.sample(logits, alone, 16)
    plain = ~truncated.mask
    assert torch.equal(mixed.state[:, plain], alone.state[:, plain])
    assert torch.equal(mixed.tokens_out[plain], alone.tokens_out[plain])
    assert torch.equal(mixed.log_probs_out[plain], alone.log_probs_out[plain])
    best = logits.argmax(1)[truncated.indices].int()
    written = (mixed.tokens_out[truncated.indices] == best[:, None]).any(1)
    assert torch.equal(written, was_running[truncated.indices])
