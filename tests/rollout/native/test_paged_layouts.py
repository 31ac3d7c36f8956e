"""Attention over blocks: prefill after a cached prefix, and decoding."""

from __future__ import annotations

import pytest
import torch

from hone.ops.attention import AttentionOptions
from hone.ops.rows import pack_rows
from hone.rollout.contract import RolloutError
from hone.rollout.native import exact_reference, kernels_reference
from hone.rollout.native.decode_step import BatchState
from hone.rollout.native.kernels_reference import RotaryTable, store_kv
from hone.rollout.native.paged_layouts import (
    TILE_ROWS,
    PagedDecode,
    PagedPrefill,
    TrainingLayout,
    decode_queries,
    queries_per_tile,
    segment_queries,
)

from .attention import HEAD_DIM, KV_HEADS, OPTIONS, assert_close, qkv, reference
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
    """`attend` with rotated heads and `attend_qkv` with one tensor before the rotation agree."""
    angles = torch.arange(16)[:, None] * torch.rand(HEAD_DIM // 2).repeat(2)
    rotary = RotaryTable(angles.cos(), angles.sin())
    joined = torch.randn(6, 8 * HEAD_DIM)
    unsplit = PagedPrefill(paged_cache(), kernels_reference, [[3, 7]], [0], [6], CPU)
    expected = unsplit.attend_qkv(joined, rotary, PLAIN)
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


@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries"), [(8, 8, 64), (8, 4, 32), (14, 2, 8), (64, 1, 1)]
)
def test_a_tile_holds_all_query_heads_of_a_key_head(
    heads: int, kv_heads: int, queries: int
) -> None:
    assert queries_per_tile(heads, kv_heads) == queries
    assert queries * (heads // kv_heads) <= TILE_ROWS


def test_more_query_heads_than_a_tile_has_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="the model has 65"):
        queries_per_tile(65, 1)


def test_tiles_cover_every_query_once_and_stay_within_a_segment() -> None:
    starts, ends = [0, 3, 4], [9, 4, 12]
    queries = segment_queries(starts, ends, [[1, 2, 3], [4], [1, 5, 6]], 4, CPU)
    spans = [range(*span) for span in zip(starts, ends, strict=True)]
    assert queries.position.tolist() == [position for span in spans for position in span]
    assert queries.row.tolist() == [0] * 9 + [1] + [2] * 8
    assert queries.block_table.tolist() == [[1, 2, 3], [4, 0, 0], [1, 5, 6]]
    tiles, covered = queries.tiles, []
    assert tiles is not None
    assert int(tiles.num_queries.max()) <= 4
    for first, count, position, row in zip(
        tiles.first_query.tolist(), tiles.num_queries.tolist(), tiles.first_position.tolist(),
        tiles.row.tolist(), strict=True,
    ):  # fmt: skip
        members = range(first, first + count)
        covered += members
        assert [int(queries.row[i]) for i in members] == [row] * count
        assert [int(queries.position[i]) for i in members] == [position + i for i in range(count)]
    assert covered == list(range(18))


def test_a_decode_step_has_one_query_per_row() -> None:
    queries = decode_queries(torch.zeros(3, 2, dtype=torch.int32), torch.tensor([5, 0, 7]))
    assert queries.row.tolist() == [0, 1, 2]
    assert queries.tiles is not None
    assert queries.tiles.first_position.tolist() == [5, 0, 7]
    assert queries.tiles.num_queries.tolist() == [1, 1, 1]


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("prompt_length", [5, 8])
def test_training_rows_attend_to_their_prompt_and_themselves(
    share_prompts: bool, prompt_length: int
) -> None:
    """Shared prompts have blocks of four tokens: a whole number of them, or a tail that is copied."""
    prompts = torch.randint(3, 50, (1, prompt_length)).repeat(2, 1)
    responses = torch.randint(3, 50, (2, 6))
    mask = torch.ones(2, prompt_length + 6, dtype=torch.int64)
    mask[1, -2:] = 0
    packed = pack_rows(
        prompts, responses, mask, mask[:, prompt_length:],
        share_prompts=share_prompts, with_packed_positions=True,
    )  # fmt: skip
    layout = TrainingLayout(
        packed, exact_reference, kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=4,
        queries_per_tile=4, dtype=torch.float32,
    )  # fmt: skip
    assert torch.equal(layout.positions, packed.position_ids)
    by_token = {}
    for row in range(2):  # keys and values belong to a token and its position, so prompts are equal
        for position in range(prompt_length + 6):
            name = ("prompt" if position < prompt_length else row, position)
            by_token.setdefault(name, qkv(1))
    where = packed.packed_positions
    assert where is not None
    rows = [
        [by_token["prompt" if p < prompt_length else row, p] for p in range(prompt_length + 6)]
        for row in range(2)
    ]
    tokens = len(packed.input_ids)
    q, k, v = (torch.zeros(tokens, *rows[0][0][i].shape[1:]) for i in range(3))
    for row in range(2):
        for position, index in enumerate(where[row].tolist()):
            if index >= 0:
                for target, value in zip((q, k, v), rows[row][position], strict=True):
                    target[index] = value[0]
    store_kv(k, v, layout.slots, layout.cache, layout.cache_layer(3))
    out = layout.attend(q, layer=3, scaling=0.3)
    for row in range(2):
        present = [(p, i) for p, i in enumerate(where[row].tolist()) if i >= 0]
        parts = [torch.cat([rows[row][p][i] for p, _ in present]) for i in range(3)]
        assert_close(out[[i for _, i in present]], reference(*parts, AttentionOptions(3, 0.3)))
