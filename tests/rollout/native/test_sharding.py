"""Shards of a policy: the tensors of each rank, the models that can be sharded, and equal results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from hone.controller.worker import free_port
from hone.models.families import DECODER_LAYER_FAMILIES, SHARDED_FAMILIES, UnsupportedModel
from hone.models.policy import PolicyModel
from hone.models.tiny import tiny_lm
from hone.rollout.contract import RolloutError, Sampling
from hone.rollout.native.engine import Core
from hone.rollout.native.sharding import Shard, check_shardable, check_sharding
from hone.rollout.requests import Request
from tests.workers.tasks import config_of, write_model

from ..factories import NativeFactory
from ..models import policy, prompts
from .law_ranks import NEAR, REQUESTS, run_rank
from .slot import cores_of, hollow, on_ranks, peers_of, shards_of


def test_a_shard_past_the_end_is_padding() -> None:
    tensor = torch.arange(10.0).view(5, 2)
    assert Shard(0, 4, 2).take(tensor).tolist() == [[8, 9], [0, 0]]
    assert Shard(0, 6, 2).take(tensor).tolist() == [[0, 0], [0, 0]]
    assert Shard(1, 1, 1).take(tensor).shape == (5, 1)


def test_a_tensor_of_another_name_or_shape_is_refused_as_a_whole() -> None:
    (shard, _) = shards_of(policy(), peers_of(2))
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(RolloutError, match=r"shape \(3, 32\); the model's has \(64, 32\)"):
        list(shard.shards([(name, torch.zeros(3, 32))]))
    with pytest.raises(RolloutError, match="Did you mean"):
        list(shard.shards([("model.layers.0.mlp.up_prj.weight", torch.zeros(64, 32))]))


@pytest.mark.parametrize(
    ("family", "size", "sentence"),
    [
        ("qwen2", 3, "has 4 attention heads, which 3 ranks cannot share evenly"),
        ("qwen2", 8, "has 4 attention heads, which 8 ranks cannot share evenly"),
        ("phi3", 2, "a phi3 model, which the native engine does not shard. Use 1"),
        ("mixtral", 2, "a mixtral model"),
        ("gpt2", 2, "a gpt2 model"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused_by_name(
    family: str, size: int, sentence: str
) -> None:
    lm = tiny_lm(25, hidden=32, mlp=48, family=family, max_positions=64)
    with pytest.raises(UnsupportedModel, match=sentence):
        check_shardable(hollow(lm), size, "the model")


def test_a_variant_with_a_norm_over_all_heads_is_refused() -> None:
    lm = tiny_lm(25, hidden=32, mlp=48, max_positions=64)
    lm.model.layers[1].self_attn.q_norm = torch.nn.RMSNorm(32)
    with pytest.raises(
        UnsupportedModel, match=r"because its layers have self_attn\.q_norm\.weight"
    ):
        check_shardable(hollow(lm), 2, "the model")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_say_what_one_says_and_an_exit_is_told(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    mp.spawn(run_rank, (2, free_port(), str(tmp_path)), nprocs=2)
    results = torch.load(tmp_path / "rank0.pt", weights_only=False)
    for core in ("slots", "pages"):
        record_property(core, results[core])
        assert results[core]["requests"] == REQUESTS
        assert all(margin < NEAR for margin in results[core]["margins"])
        assert len(results[core]["margins"]) < REQUESTS // 100
        assert results[core]["worst"] < 1e-5
    assert "another of 2 tensor-parallel ranks has exited" in results["exit"]


def test_what_ranks_cannot_share_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    config = config_of(model).actor_rollout_ref.model
    check_sharding(2, 4, config)
    with pytest.raises(RolloutError, match="=3 does not divide the 4 rollout rank"):
        check_sharding(3, 4, config)
    with pytest.raises(UnsupportedModel, match="has 4 attention heads"):
        check_sharding(3, 3, config)


def decoded(core: Core, samplings: list[Sampling]) -> list[tuple[list[int], list[float]]]:
    requests = [
        Request(prompt, sampling, str(i))
        for i, (prompt, sampling) in enumerate(zip(prompts(len(samplings)), samplings, strict=True))
    ]
    for request in requests:
        core.add(request)
    while core.busy:
        core.step(lambda: True)
    return [(request.token_ids, request.log_probs) for request in requests]


def assert_ranks_say_what_one_says(model: PolicyModel, size: int, *, paged: bool = False) -> None:
    samplings = [Sampling(6, 1.0 if i % 3 else 0.0, i, top_k=-1 if i % 4 else 5) for i in range(12)]
    one: Any = NativeFactory().build(model)
    expected = decoded(one._core, samplings)
    cores = cores_of(shards_of(model, peers_of(size)), paged=paged)
    for outputs in on_ranks(size, lambda rank: decoded(cores[rank], samplings)):
        for (tokens, log_probs), (expected_tokens, expected_log_probs) in zip(
            outputs, expected, strict=True
        ):
            assert tokens == expected_tokens
            assert log_probs == pytest.approx(expected_log_probs, abs=1e-5)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=() if f in ("qwen2", "qwen3", "gemma") else pytest.mark.slow)
        for f in sorted(SHARDED_FAMILIES)
    ],
)
def test_two_ranks_say_what_one_says(family: str) -> None:
    if family in DECODER_LAYER_FAMILIES or family == "gemma":
        model = policy(family)
    else:
        model = PolicyModel(tiny_lm(25, hidden=32, mlp=48, family=family, seed=1).eval())
    assert_ranks_say_what_one_says(model, 2)
    assert_ranks_say_what_one_says(model, 2, paged=True)


def test_ranks_repeat_key_heads_pad_the_vocabulary_and_columns_and_add_biases_once() -> None:
    """Four ranks, two key-value heads, 25 tokens, 50 columns, and a head of its own weights."""
    lm = tiny_lm(25, hidden=32, mlp=50, seed=1, max_positions=64, tie_embeddings=False).eval()
    lm.config.pad_token_id = None
    for layer in lm.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.bias = torch.nn.Parameter(torch.randn(32))
    assert_ranks_say_what_one_says(PolicyModel(lm), 4)
    shards = shards_of(PolicyModel(lm), peers_of(4))
    num_parameters = sum(p.numel() for p in lm.parameters())
    assert all(sum(p.numel() for p in s.parameters()) < 0.35 * num_parameters for s in shards)
    assert {s.key_shape for s in shards} == {(1, 8)}
