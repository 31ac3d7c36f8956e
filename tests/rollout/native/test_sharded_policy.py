"""Shards of a policy: what each rank holds, which models can be shared, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch

from hone.models.families import UnsupportedModel
from hone.models.tiny import tiny_lm
from hone.rollout.contract import RolloutError
from hone.rollout.native.sharded_policy import Shard, check_shardable

from ..models import policy
from .slot import hollow, peers_of, shards_of


def test_a_shard_past_the_end_is_padding() -> None:
    whole = torch.arange(10.0).view(5, 2)
    assert Shard(0, 4, 2).take(whole).tolist() == [[8, 9], [0, 0]]
    assert Shard(0, 6, 2).take(whole).tolist() == [[0, 0], [0, 0]]
    assert Shard(1, 1, 1).take(whole).shape == (5, 1)


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
