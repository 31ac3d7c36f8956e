"""Exact mode on a GPU: its kernels against their references, and the same bits on both sides in bf16."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from rollout.engine_contract import ask_all

from hone.models.decoder_layer import fuse
from hone.models.policy import PolicyModel
from hone.models.tiny import tiny_lm
from hone.ops.rows import pack_rows
from hone.rollout.contract import Sampling
from hone.rollout.native import exact_reference
from hone.rollout.native.engine import NativeRollout
from hone.rollout.native.exact_decoder import ExactDecoder
from hone.rollout.native.paged_cache import PagedCache
from hone.rollout.native.paged_core import PagedCore
from hone.rollout.native.paged_layouts import (
    Queries,
    decode_queries,
    queries_per_tile,
    segment_queries,
)

from .device import DEVICE, INTERPRETED, needs_gpu, needs_kernels, relative_error

HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter cannot multiply bfloat16
TOLERANCE = {torch.float32: 1e-5, HALF: 1e-2}


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(3, 96, 160), (70, 200, 100)])
class TestProduct:
    pytestmark = needs_kernels

    def test_it_equals_its_reference(
        self, dtype: torch.dtype, rows: int, inputs: int, outputs: int
    ) -> None:
        from hone.rollout.native import exact_triton

        x = torch.randn(rows, inputs, device=DEVICE).to(dtype)
        weight = torch.randn(outputs, inputs, device=DEVICE).to(dtype)
        bias = torch.randn(outputs, device=DEVICE).to(dtype)
        for bias_or_none in (None, bias):
            actual = exact_triton.linear(x, weight, bias_or_none)
            expected = torch.nn.functional.linear(
                x.float(),
                weight.float(),
                bias_or_none.float() if bias_or_none is not None else None,
            )
            assert actual.dtype == dtype
            assert relative_error(actual, expected) < TOLERANCE[dtype]
            unrounded = exact_triton.linear(x, weight, bias_or_none, float32_out=True)
            assert unrounded.dtype == torch.float32


@pytest.mark.parametrize(
    ("inputs", "outputs"), [(896, 1152), (4864, 896), (896, 9728), (576, 49152)]
)
class TestTiles:
    pytestmark = needs_gpu

    def test_no_bit_depends_on_the_number_of_rows_or_the_tile(
        self, inputs: int, outputs: int
    ) -> None:
        from hone.rollout.native import exact_triton

        x = torch.randn(1500, inputs, device=DEVICE).bfloat16()
        weight = (torch.randn(outputs, inputs, device=DEVICE) * 0.02).bfloat16()
        whole = exact_triton.linear(x, weight, None, float32_out=True)
        for tile in (exact_triton.SMALL_TILE, exact_triton.LARGE_TILE):
            assert torch.equal(
                exact_triton.linear(x, weight, None, float32_out=True, tile=tile), whole
            )
        for begin, end in ((0, 1), (9, 20), (100, 356), (700, 1300)):
            assert torch.equal(
                exact_triton.linear(x[begin:end], weight, None, float32_out=True), whole[begin:end]
            )


SHAPES = [(14, 2, 64), (4, 4, 32), (12, 2, 128), (8, 2, 80)]


def cache_of(kv_heads: int, head_dim: int, dtype: torch.dtype) -> PagedCache:
    cache = PagedCache(
        num_layers=2, kv_heads=kv_heads, head_dim=head_dim, num_blocks=40, block_size=16, dtype=dtype,
        device=DEVICE,
    )  # fmt: skip
    cache.reserve()
    assert cache._memory is not None
    cache._memory.normal_()
    return cache


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
class TestAttention:
    pytestmark = needs_kernels

    def test_it_equals_its_reference_and_tiles_change_no_bit(
        self, shape: tuple[int, int, int], dtype: torch.dtype
    ) -> None:
        from hone.rollout.native import exact_triton

        heads, kv, d = shape
        cache = cache_of(kv, d, dtype)
        blocks = torch.randint(1, 40, (3, 12)).tolist()
        starts, ends = [0, 30, 7], [45, 80, 8]
        per_tile = queries_per_tile(heads, kv)
        queries = segment_queries(starts, ends, blocks, per_tile, DEVICE)
        q = torch.randn(len(queries.position), heads, d, device=DEVICE).to(dtype)
        actual = exact_triton.query_attention(q, cache, 1, queries, scaling=d**-0.5)
        slow = PagedCache(
            num_layers=2, kv_heads=kv, head_dim=d, num_blocks=40, block_size=16, dtype=torch.float32,
            device=torch.device("cpu"),
        )  # fmt: skip
        slow.reserve()
        assert slow._memory is not None
        assert cache._memory is not None
        slow._memory.copy_(cache._memory)
        on_cpu = Queries(queries.position.cpu(), queries.row.cpu(), queries.block_table.cpu(), None)
        expected = exact_reference.query_attention(
            q.float().cpu(), slow, 1, on_cpu, scaling=d**-0.5
        )
        assert relative_error(actual.cpu(), expected) < TOLERANCE[dtype]
        # Each query alone, as decoding asks.
        alone = decode_queries(queries.block_table[queries.row], queries.position)
        assert torch.equal(
            exact_triton.query_attention(q, cache, 1, alone, scaling=d**-0.5), actual
        )


class TestLogProbs:
    pytestmark = needs_kernels

    def test_the_sampled_token_has_the_log_prob_that_the_trainer_computes(self) -> None:
        from hone.rollout.native import exact_triton
        from hone.rollout.native.decode_step import BatchState

        logits = torch.randn(40, 9000, device=DEVICE) * 4
        rows = BatchState.empty(40, 20, 5, DEVICE)
        rows.state[3] = torch.arange(40)
        rows.state[4] = 100
        rows.state[5] = 0
        rows.inverse_temperature.copy_(torch.rand(40) + 0.5)
        rows.greedy[::4] = 1
        exact_triton.sample(logits, rows, 16)
        tokens = rows.tokens_out[:, 0].long()
        log_probs = exact_triton.token_log_probs(logits, tokens, rows.inverse_temperature)
        assert torch.equal(log_probs, rows.log_probs_out[:, 0])
        heat = rows.inverse_temperature[:, None]
        expected = torch.log_softmax(logits * heat, -1).gather(-1, tokens[:, None])[:, 0]
        assert torch.allclose(log_probs, expected, atol=1e-5)


def policy_of(family: str, dtype: torch.dtype = torch.bfloat16) -> PolicyModel:
    lm: Any = tiny_lm(
        5000, hidden=448, layers=4, heads=7, kv_heads=1, mlp=1000, family=family, eos_token_id=None
    )
    policy = PolicyModel(lm.to(dtype).cuda().eval())
    fuse(policy)
    policy.exact = ExactDecoder(policy)
    return policy


def engine_of(policy: PolicyModel, **changed: Any) -> NativeRollout:
    options: dict[str, Any] = {
        "eos_ids": (), "max_num_seqs": 48, "max_num_batched_tokens": 2048, "max_model_len": 500,
        "gpu_memory_utilization": 0.1, "exact": policy.exact,
    }  # fmt: skip
    return NativeRollout(PagedCore(policy, **(options | changed)))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("eager", [False, True])
class TestAgreement:
    pytestmark = needs_gpu

    def test_rollout_and_trainer_agree_to_the_last_bit(self, family: str, eager: bool) -> None:
        policy = policy_of(family)
        lengths = torch.randint(1, 200, (40,)).tolist()
        rows = [
            prompt
            for n in torch.randint(1, 200, (20,)).tolist()
            for prompt in [torch.randint(3, 5000, (n,)).tolist()] * 2
        ]
        sampling = [Sampling(n, 0.7, seed=i, ignore_eos=True) for i, n in enumerate(lengths)]
        engine = engine_of(policy, enforce_eager=eager, blocks=600)
        outputs = ask_all(engine, rows, sampling)
        asyncio.run(engine.close())
        width, response_width = max(map(len, rows)), max(lengths)
        prompts = torch.zeros(40, width, dtype=torch.int64)
        responses, mask = torch.zeros(2, 40, response_width, dtype=torch.int64)
        seen, log_probs = (
            torch.zeros(40, width + response_width, dtype=torch.int64),
            torch.zeros(40, response_width),
        )
        for i, (row, out) in enumerate(zip(rows, outputs, strict=True)):
            prompts[i, width - len(row) :] = torch.tensor(row)
            responses[i, : lengths[i]] = torch.tensor(out.token_ids)
            mask[i, : lengths[i]] = 1
            seen[i, width - len(row) : width + lengths[i]] = 1
            log_probs[i, : lengths[i]] = torch.tensor(out.log_probs)
        for cut in (list(range(40)), [3], [8, 30]):
            packed = pack_rows(
                prompts[cut], responses[cut], seen[cut], mask[cut], share_prompts=False
            )
            out = policy(packed.to(DEVICE), temperature=0.7, with_entropy=True)
            assert float((out["log_probs"].detach().cpu() - log_probs[cut]).abs().max()) == 0.0
            out["log_probs"].sum().backward()
            assert all(torch.isfinite(p.grad).all() for p in policy.parameters())
