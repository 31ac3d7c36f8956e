"""Routers and experts equal those of transformers; test_engine.py runs them over several ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from benchmarks.families.tiny import randomise, tiny_config

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow  # importing megatron-core takes seconds


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_and_experts_equal_those_of_transformers(dtype, normalizes):
    from hone.engine.megatron.experts import MicroBatchParams, PackedExperts, Router

    hf = tiny_config("qwen3_moe")
    hf.norm_topk_prob = normalizes
    block = Qwen3MoeSparseMoeBlock(hf).to(dtype)
    randomise(block)
    config = SimpleNamespace(
        moe_router_topk=hf.num_experts_per_tok,
        moe_router_dtype=None,
        moe_ffn_hidden_size=hf.moe_intermediate_size,
        num_moe_experts=hf.num_experts,
        hidden_size=hf.hidden_size,
        params_dtype=dtype,
        sequence_parallel=False,
    )
    one = SimpleNamespace(size=lambda: 1)
    experts = PackedExperts(hf.num_experts, config, pg_collection=SimpleNamespace(expt_tp=one))
    router = Router(config)
    router.moe_layer_index, router.normalizes_gates, router.params = (
        0,
        normalizes,
        MicroBatchParams(),
    )
    with torch.no_grad():
        router.weight.copy_(block.gate.weight)
        experts.gate_up.copy_(block.experts.gate_up_proj)
        experts.down.copy_(block.experts.down_proj)
    hidden = torch.randn(9, 1, hf.hidden_size, dtype=dtype)
    gates, choices = router(hidden)
    _, top, indices = block.gate(hidden)
    assert torch.equal(gates.gather(1, indices), top)
    assert torch.equal(choices, torch.zeros_like(choices).scatter(1, indices, True))
    assert torch.equal(router.params.experts[0], indices)
    expert, token = choices.T.nonzero(as_tuple=True)  # sorted by expert
    out, _ = experts(hidden[token, 0], choices.sum(0), gates[token, expert])
    summed = torch.zeros(9, hf.hidden_size, dtype=dtype).index_add(0, token, out)
    expected = block(hidden.transpose(0, 1))[0]
    bound = 1e-6 if dtype == torch.float32 else 2e-2
    assert (summed - expected).abs().max() < bound * expected.abs().max()


def test_layers_without_experts_are_those_of_transformers():
    from hone.engine.megatron.experts import moe_layer_indices

    config = AutoConfig.for_model(
        "qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]
    )
    assert moe_layer_indices(config) == [1, 5]
    assert moe_layer_indices(AutoConfig.for_model("qwen3")) == []
