"""The decoder forward of a CPU against plain transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hone.models.policy import PolicyModel
from hone.models.tiny import tiny_lm
from hone.rollout.native.cache import PrefillLayout, SlotCache
from hone.rollout.native.decoder import Forward, ModuleDecoder, PlainDecoder, decoder_forward

LENGTHS = [7, 3]
KINDS: list[type[PlainDecoder] | type[ModuleDecoder]] = [PlainDecoder, ModuleDecoder]


def policy_of(family: str) -> PolicyModel:
    return PolicyModel(tiny_lm(30, hidden=32, layers=2, family=family, tie_embeddings=False)).eval()


@torch.no_grad()
def computed(forward: Forward, ids: Tensor) -> Tensor:
    """The logits of two prompts through the cache of the CPU core."""
    cache = SlotCache(num_layers=2, num_slots=2)
    cache.reserve(max(LENGTHS), 0)
    forward.refresh()
    layout = PrefillLayout(cache, [0, 1], LENGTHS)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return forward.logits(forward(ids, positions, layout))


@torch.no_grad()
def expected(policy: PolicyModel, ids: Tensor) -> Tensor:
    """The logits of each prompt alone through plain transformers."""
    policy.lm.set_attn_implementation("eager")
    try:
        return torch.cat([policy.lm(part[None]).logits[0] for part in ids.split(LENGTHS)])
    finally:
        policy.lm.set_attn_implementation("hone")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_these_families_run_without_their_modules(family: str) -> None:
    assert type(decoder_forward(policy_of(family))) is PlainDecoder


def test_other_families_run_their_modules() -> None:
    assert type(decoder_forward(policy_of("gemma"))) is ModuleDecoder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_are_those_of_plain_transformers(
    family: str, kind: type[PlainDecoder] | type[ModuleDecoder]
) -> None:
    policy, ids = policy_of(family), torch.randint(3, 30, (sum(LENGTHS),))
    torch.testing.assert_close(
        computed(kind(policy), ids), expected(policy, ids), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_training_writes_in_place_is_read_at_the_next_refresh(
    kind: type[PlainDecoder] | type[ModuleDecoder],
) -> None:
    policy, ids = policy_of("qwen2"), torch.randint(3, 30, (sum(LENGTHS),))
    forward = kind(policy)
    before = computed(forward, ids)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    after = computed(forward, ids)
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, expected(policy, ids), rtol=1e-4, atol=1e-5)


def test_parameters_that_are_replaced_are_read_after_invalidate() -> None:
    policy, ids = policy_of("llama"), torch.randint(3, 30, (sum(LENGTHS),))
    forward = PlainDecoder(policy)
    computed(forward, ids)
    other = policy_of("llama")
    with torch.no_grad():
        for module, source in zip(policy.modules(), other.modules(), strict=True):
            for name, parameter in source.named_parameters(recurse=False):
                setattr(module, name, torch.nn.Parameter(parameter * 0.5))
    forward.invalidate()
    torch.testing.assert_close(computed(forward, ids), expected(policy, ids), rtol=1e-4, atol=1e-5)
