"""Layouts of exact mode: tiles of queries, and training rows over a cache of blocks."""

from __future__ import annotations

import pytest
import torch

from hone.ops.attention import AttentionOptions
from hone.ops.packing import pack_rows
from hone.rollout.native import exact_reference
from hone.rollout.native.exact_layouts import (
    TILE_ROWS,
    TrainingLayout,
    decode_queries,
    queries_per_tile,
    segment_queries,
)
from hone.rollout.native.kernels_reference import store_kv

from .attention import HEAD_DIM, KV_HEADS, assert_close, qkv, reference

CPU = torch.device("cpu")


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
