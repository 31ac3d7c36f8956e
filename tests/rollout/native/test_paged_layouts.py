"""Attention over blocks: prefill after a cached prefix, and decoding."""

from __future__ import annotations

import pytest
import torch

from hone.ops.attention import AttentionOptions
from hone.rollout.contract import RolloutError
from hone.rollout.native import kernels_reference
from hone.rollout.native.batch_state import BatchState
from hone.rollout.native.kernels_reference import RotaryTable
from hone.rollout.native.paged_layouts import PagedDecode, PagedPrefill

from .attention import HEAD_DIM, OPTIONS, assert_close, qkv, reference
from .test_kernels_reference import paged_cache, slots_of

CPU = torch.device("cpu")
PLAIN = AttentionOptions(0, 0.3)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("starts", [[0, 0, 0], [4, 0, 8]])
def test_new_tokens_attend_to_their_sequence_and_its_cached_prefix(
    starts: list[int], options: AttentionOptions
) -> None:
    cache, ends, blocks = paged_cache(), [6, 3, 11], [[3, 7], [5], [1, 2, 9]]
    sequences = [qkv(end) for end in ends]
    for (_, k, v), row_blocks, start in zip(sequences, blocks, starts, strict=True):
        slots = slots_of(row_blocks, start)
        kernels_reference.store_kv(k[:start], v[:start], slots, cache, options.layer)
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    layout = PagedPrefill(cache, kernels_reference, blocks, starts, lengths, CPU)
    new = [[x[start:] for x in s] for s, start in zip(sequences, starts, strict=True)]
    q, k, v = (torch.cat(parts) for parts in zip(*new, strict=True))
    out = layout.attend(q, k, v, options)
    expected = [reference(n[0], s[1], s[2], options) for n, s in zip(new, sequences, strict=True)]
    assert_close(out, torch.cat(expected))
    positions = [torch.arange(*r) for r in zip(starts, ends, strict=True)]
    assert torch.equal(layout.positions, torch.cat(positions))


@pytest.mark.parametrize("options", OPTIONS)
def test_a_decoded_token_is_stored_and_attends_to_its_row(options: AttentionOptions) -> None:
    cache, lengths, blocks = paged_cache(), [6, 8], [[3, 7, 0], [1, 2, 9]]
    rows = BatchState.empty(2, 3, 1, CPU)
    rows.block_table.copy_(torch.tensor(blocks))
    rows.position.copy_(torch.tensor(lengths))
    rows.slot.copy_(
        torch.stack([slots_of(b, n + 1)[-1] for b, n in zip(blocks, lengths, strict=True)])
    )
    sequences = [qkv(length + 1) for length in lengths]
    for (_, k, v), row_blocks, length in zip(sequences, blocks, lengths, strict=True):
        slots = slots_of(row_blocks, length)
        kernels_reference.store_kv(k[:length], v[:length], slots, cache, options.layer)
    q, k, v = (torch.stack([s[i][-1] for s in sequences]) for i in range(3))
    out = PagedDecode(cache, kernels_reference, rows).attend(q, k, v, options)
    for row, (_, keys, values) in enumerate(sequences):
        assert_close(out[row : row + 1], reference(q[row : row + 1], keys, values, options))


def test_joined_queries_keys_and_values_are_turned_first() -> None:
    """Both ways into the layouts agree: rotated heads, and one tensor before the rotation."""
    angles = torch.arange(16)[:, None] * torch.rand(HEAD_DIM // 2).repeat(2)
    rotary = RotaryTable(angles.cos(), angles.sin())
    joined = torch.randn(6, 8 * HEAD_DIM)
    whole = PagedPrefill(paged_cache(), kernels_reference, [[3, 7]], [0], [6], CPU)
    expected = whole.attend_qkv(joined, rotary, PLAIN)
    cache = paged_cache()
    PagedPrefill(cache, kernels_reference, [[3, 7]], [0], [5], CPU).attend_qkv(
        joined[:5], rotary, PLAIN
    )
    rows = BatchState.empty(1, 2, 1, CPU)
    rows.block_table.copy_(torch.tensor([[3, 7]]))
    rows.position.fill_(5)
    rows.slot.copy_(slots_of([3, 7], 6)[-1:])
    out = PagedDecode(cache, kernels_reference, rows).attend_qkv(joined[5:], rotary, PLAIN)
    torch.testing.assert_close(out, expected[5:], rtol=1e-5, atol=1e-6)


def test_keys_of_another_shape_than_the_config_are_refused() -> None:
    layout = PagedPrefill(paged_cache(), kernels_reference, [[3]], [0], [2], CPU)
    q, k, v = qkv(2)
    with pytest.raises(RolloutError, match=r"\(1, 8\)"):
        layout.attend(q, k[:, :1], v[:, :1], PLAIN)
