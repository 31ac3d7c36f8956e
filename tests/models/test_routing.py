"""Expert routing: recording in one forward and replay in another."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.families.tiny import randomise, tiny_config
from hone.engine.contract import Options
from hone.models.families import FAMILIES, UnsupportedModel
from hone.models.policy import PolicyModel, register_attention
from hone.models.routing import expert_load_metrics, routing_shape
from hone.ops.rows import PackedRows, pack_rows

QUICK = ("deepseek_v3", "gpt_oss", "granitemoe", "mixtral", "qwen3_moe")
"""Top-k of probabilities, of logits before the softmax, and of biased scores in groups."""
NOT_REPLAYED = {"flint", "jetmoe"}
EXPERTS_EVERYWHERE = {"first_k_dense_replace": 0, "mlp_layer_types": ["sparse", "sparse"]}
OPTIONS: Options = {"temperature": 1.0}


def moe_policy(family: str) -> PolicyModel:
    config = tiny_config(family)
    for name, value in EXPERTS_EVERYWHERE.items():
        if hasattr(config, name):
            setattr(config, name, value)
    lm = AutoModelForCausalLM.from_config(config, attn_implementation=register_attention()).eval()
    randomise(lm)
    return PolicyModel(lm)


def tie_experts(policy: PolicyModel, seed: int) -> None:
    """Makes all experts but one almost equally good, so that noise of 3e-7 decides between them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in policy.lm.named_parameters():
            if name.endswith("gate.weight"):
                weight[2:] = weight[1]
                weight += 3e-7 * torch.randn(weight.shape, generator=generator)


def packed_rows() -> PackedRows:
    """Two groups of two rows that share a prompt."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 90, (2, 5), generator=generator).repeat_interleave(2, 0)
    responses = torch.randint(3, 90, (4, 6), generator=generator)
    mask = torch.ones(4, 11, dtype=torch.long)
    mask[::2, 0], mask[1::2, 0] = 0, 0
    mask[1, 8:] = 0
    columns = (prompts, responses, mask, mask[:, 5:])
    return pack_rows(*columns, share_prompts=True, with_packed_positions=True)


def check_family(family: str) -> None:
    policy = moe_policy(family)
    packed = packed_rows()
    plain = policy(packed, **OPTIONS)["log_probs"]
    policy.enable_routing()
    recorded = policy(packed, with_routing=True, **OPTIONS)
    assert torch.equal(recorded["log_probs"], plain)
    routed = recorded["routed_experts"]
    replayed = policy(packed.with_experts(routed), **OPTIONS)
    assert torch.allclose(replayed["log_probs"], plain, atol=1e-6)
    mask = replayed["log_probs"] != 0
    assert replayed["routing_agreement"][mask].min() == 1.0
    others = torch.where(routed >= 0, (routed + 1) % 4, routed)
    other = policy(packed.with_experts(others), with_routing=True, **OPTIONS)
    assert torch.equal(other["routed_experts"], others)
    assert other["routing_agreement"][mask].max() < 1.0
    assert (other["log_probs"] - plain).abs().max() > 1e-3


@pytest.mark.parametrize("family", QUICK)
def test_a_forward_pass_uses_the_experts_that_another_one_recorded(family: str) -> None:
    check_family(family)


@pytest.mark.slow
def test_every_family_with_experts_replays_or_refuses() -> None:
    moe_families = [
        name for name in sorted(FAMILIES) if routing_shape(tiny_config(name)) is not None
    ]
    refused = set()
    for family in moe_families:
        try:
            check_family(family)
        except UnsupportedModel:
            refused.add(family)
    assert refused == NOT_REPLAYED & set(moe_families)


def test_a_dense_model_has_no_routing() -> None:
    with pytest.raises(UnsupportedModel, match="a qwen3 model has no experts"):
        moe_policy("qwen3").enable_routing()


def test_the_gradient_of_a_replay_reaches_the_router_also_through_checkpointed_layers() -> None:
    gradients = []
    packed = packed_rows()
    for checkpointed in (False, True):
        policy = moe_policy("qwen3_moe")
        policy.enable_routing()
        with torch.no_grad():
            routed = policy(packed, with_routing=True, **OPTIONS)["routed_experts"]
        if checkpointed:
            policy.lm.gradient_checkpointing_enable({"use_reentrant": False})
            policy.train()
        others = torch.where(routed >= 0, (routed + 1) % 4, routed)
        policy(packed.with_experts(others), **OPTIONS)["log_probs"].sum().backward()
        gates = [p.grad for n, p in policy.lm.named_parameters() if n.endswith("gate.weight")]
        assert all(g is not None and g.abs().max() > 0 for g in gates)
        gradients.append(gates)
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_loads_are_counted_per_layer_without_unrecorded_tokens() -> None:
    routed = torch.tensor([[[[0, 1]], [[0, 2]], [[-1, -1]], [[3, 3]]]])  # [1, 4, 1, 2]
    mask = torch.tensor([[1, 1, 1, 0]])
    metrics = expert_load_metrics(routed, mask, experts=4)
    assert metrics["moe/layer_0/max_load"] == pytest.approx(0.5 / 0.25)
    # Shares 1/2, 1/4, 1/4, 0 have 1.5 of 2 bits.
    assert metrics["moe/layer_0/entropy"] == pytest.approx(0.75)
