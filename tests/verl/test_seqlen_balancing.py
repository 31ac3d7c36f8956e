"""Micro-batches: every row once, within the budget."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.protocol import DataProto
from hone.verl.seqlen_balancing import (
    ceildiv,
    get_group_balanced_partitions,
    get_reverse_idx,
    log_seqlen_unbalance,
    micro_batches_by_tokens,
    prepare_dynamic_batch,
    rearrange_micro_batches,
    restore_dynamic_batch,
    roundup_divisible,
)

lengths_of = st.lists(st.integers(0, 300), min_size=1, max_size=40)


def loads(parts, lengths):
    return [sum(lengths[row] for row in part) for part in parts]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(lengths_of, st.integers(300, 900), st.integers(1, 3))
def test_no_micro_batch_exceeds_the_budget(lengths, budget, multiple_of):
    lengths = lengths * multiple_of  # enough rows for any multiple
    parts = micro_batches_by_tokens(lengths, budget, multiple_of=multiple_of)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert max(loads(parts, lengths)) <= budget
    assert all(parts)
    assert len(parts) % multiple_of == 0


def test_no_more_micro_batches_than_needed():
    assert len(micro_batches_by_tokens([50, 50, 50, 50], 100)) == 2
    assert len(micro_batches_by_tokens([60, 60, 60], 100)) == 3  # 180 tokens, but no two rows fit
    assert len(micro_batches_by_tokens([10] * 10, 100)) == 1
    assert len(micro_batches_by_tokens([], 100)) == 0


def test_first_fit_saves_what_differencing_cannot_pack():
    lengths = [6, 5, 5, 4, 4, 3, 3]  # 30 tokens; 10 a bin is tight
    parts = micro_batches_by_tokens(lengths, 10)
    assert max(loads(parts, lengths)) <= 10


def test_ranks_can_agree_on_a_larger_count():
    parts = micro_batches_by_tokens([10] * 8, 100, min_micro_batches=5)
    assert len(parts) == 5
    assert len(micro_batches_by_tokens([10] * 8, 100, min_micro_batches=5, multiple_of=4)) == 8
    with pytest.raises(ValueError, match="2 sequences cannot form 3"):
        micro_batches_by_tokens([10, 10], 100, min_micro_batches=3)


def test_a_sequence_longer_than_the_budget_is_refused_and_says_which_key():
    with pytest.raises(ValueError, match=r"101 tokens.*max_token_len_per_gpu"):
        micro_batches_by_tokens([101, 3], 100)
    assert micro_batches_by_tokens([100], 100) == [[0]]


def test_cheap_micro_batches_come_first_and_last():
    parts = micro_batches_by_tokens([90, 30, 60, 80, 40], 90, min_micro_batches=5)
    assert loads(parts, [90, 30, 60, 80, 40]) == [30, 60, 90, 80, 40]


def test_the_reverse_index_restores_the_order():
    order = [3, 1, 0, 2]
    rows = ["a", "b", "c", "d"]
    moved = [rows[i] for i in order]
    assert [moved[i] for i in get_reverse_idx(order)] == rows


def test_unbalance_metrics_compare_the_original_order_and_the_partitions():
    metrics = log_seqlen_unbalance([1, 2, 3, 10], [[0, 3], [1, 2]], "global_seqlen")
    assert metrics == {
        "global_seqlen/min": 3,
        "global_seqlen/max": 13,
        "global_seqlen/minmax_diff": 10,
        "global_seqlen/balanced_min": 5,
        "global_seqlen/balanced_max": 11,
        "global_seqlen/mean": 8,
    }


LENGTHS = [3, 9, 4, 4, 7, 1, 2, 8]


def batch() -> DataProto:
    mask = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    return DataProto.from_dict(
        {"input_ids": torch.arange(72).reshape(8, 9), "attention_mask": mask.long()}
    )


def test_micro_batches_keep_the_budget_and_can_be_restored() -> None:
    pieces, rows = prepare_dynamic_batch(batch(), max_token_len=12)
    assert all(piece.batch["attention_mask"].sum() <= 12 for piece in pieces)
    joined = torch.cat([piece.batch["input_ids"] for piece in pieces])
    assert torch.equal(restore_dynamic_batch(joined, rows), batch().batch["input_ids"])
    with pytest.raises(AssertionError, match="row numbers"):
        restore_dynamic_batch(joined[1:], rows)


def test_rows_of_a_forced_group_stay_together_and_minimum_counts_are_kept() -> None:
    _, rows = rearrange_micro_batches(batch().batch, 14, force_group_size=2)
    assert all(part[i] + 1 == part[i + 1] for part in rows for i in range(0, len(part), 2))
    assert sorted(chain(*rows)) == list(range(8))
    assert len(rearrange_micro_batches(batch().batch, 99, min_num_micro_batch=3)[1]) == 3
    assert len(rearrange_micro_batches(batch().batch, 12, num_batches_divided_by=4)[1]) == 4


def test_jagged_rows_are_measured_by_their_own_lengths() -> None:
    ids = torch.nested.as_nested_tensor([torch.arange(n) for n in LENGTHS], layout=torch.jagged)
    pieces, _ = rearrange_micro_batches(DataProto.from_dict({"input_ids": ids}).batch, 12)
    assert sorted(len(row) for p in pieces for row in p["input_ids"].unbind()) == sorted(LENGTHS)


def test_the_rows_of_one_prompt_stay_in_one_partition() -> None:
    uids = [0, 1, 0, 1, 2, 2, 3, 3]
    parts = get_group_balanced_partitions(LENGTHS, uids, 2)
    assert sorted(chain(*parts)) == list(range(8))
    assert not {uids[row] for row in parts[0]} & {uids[row] for row in parts[1]}
    with pytest.raises(AssertionError, match="4 groups"):
        get_group_balanced_partitions(LENGTHS, uids, 5)


def test_rounding() -> None:
    assert (ceildiv(7, 2), roundup_divisible(7, 4)) == (4, 8)
