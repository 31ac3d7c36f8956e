"""The slot cache of the CPU core, and attention over it."""

from __future__ import annotations

import pytest
import torch

from hone.ops.attention import AttentionOptions
from hone.rollout.native.cache import DecodeLayout, JointLayout, PrefillLayout, SlotCache

from .attention import HEAD_DIM, KV_HEADS, OPTIONS, assert_close, qkv, reference

PLAIN = AttentionOptions(0, 0.3)
Prompt = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def prefilled(
    lengths: list[int], options: AttentionOptions
) -> tuple[SlotCache, list[Prompt], torch.Tensor]:
    """A cache with one prompt per slot, the prompts, and the attention of all prompt tokens."""
    cache = SlotCache(num_layers=1, num_slots=8)
    cache.reserve(max(lengths) + 1, 0)
    prompts = [qkv(length) for length in lengths]
    q, k, v = (torch.cat(parts) for parts in zip(*prompts, strict=True))
    layout = PrefillLayout(cache, list(range(len(lengths))), lengths)
    return cache, prompts, layout.attend(q, k, v, options)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lengths", [[5, 17, 1], [6, 6]])
def test_prefill_attends_within_each_prompt(lengths: list[int], options: AttentionOptions) -> None:
    _, prompts, out = prefilled(lengths, options)
    assert_close(out, torch.cat([reference(*prompt, options) for prompt in prompts]))


@pytest.mark.parametrize("options", OPTIONS)
def test_a_decoded_token_attends_to_its_whole_slot(options: AttentionOptions) -> None:
    lengths = [5, 17, 1]
    cache, prompts, _ = prefilled(lengths, options)
    q, k, v = qkv(3)
    out = DecodeLayout(cache, torch.tensor(lengths)).attend(q, k, v, options)
    for row, (_, keys, values) in enumerate(prompts):
        keys, values = (
            torch.cat([old, new[row : row + 1]]) for old, new in ((keys, k), (values, v))
        )
        assert_close(out[row : row + 1], reference(q[row : row + 1], keys, values, options))


def test_a_joint_batch_is_its_parts_and_zeros_for_padding() -> None:
    cache, prompts, _ = prefilled([4, 9], PLAIN)
    q, k, v = qkv(2 + 3 + 1)  # two running sequences, a new prompt, one row of padding
    decode = DecodeLayout(cache, torch.tensor([4, 9]))
    out = JointLayout(decode, PrefillLayout(cache, [2], [3])).attend(q, k, v, PLAIN)
    for row, (_, keys, values) in enumerate(prompts):
        one = slice(row, row + 1)
        expected = reference(q[one], torch.cat([keys, k[one]]), torch.cat([values, v[one]]), PLAIN)
        assert_close(out[one], expected)
    assert_close(out[2:5], reference(q[2:5], k[2:5], v[2:5], PLAIN))
    assert torch.equal(out[5:], torch.zeros_like(out[5:]))


def test_growing_keeps_the_used_slots() -> None:
    cache, prompts, _ = prefilled([5, 7], PLAIN)
    before = cache.nbytes
    cache.reserve(200, num_used_slots=2)
    assert cache.nbytes > before
    keys, values = cache.layer(0, prompts[0][1])
    for slot, (_, k, v) in enumerate(prompts):
        assert torch.equal(keys[slot, :, : len(k)], k.transpose(0, 1))
        assert torch.equal(values[slot, :, : len(v)], v.transpose(0, 1))


def test_a_copied_slot_has_the_first_tokens_and_a_freed_cache_no_memory() -> None:
    cache, prompts, _ = prefilled([5, 7], PLAIN)
    cache.copy(1, 4, 6)
    keys, _ = cache.layer(0, prompts[0][1])
    assert keys.shape[1:] == (KV_HEADS, keys.shape[2], HEAD_DIM)
    assert torch.equal(keys[4, :, :6], keys[1, :, :6])
    assert not keys[4, :, 6:].any()
    cache.free()
    assert cache.nbytes == 0
