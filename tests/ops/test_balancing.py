"""Balancing and micro-batches: every row once, similar loads, within the budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.ops.balancing import (
    calculate_workload,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    log_seqlen_unbalance,
    micro_batches_by_tokens,
)

lengths_of = st.lists(st.integers(0, 300), min_size=1, max_size=40)


def loads(parts, lengths):
    return [sum(lengths[row] for row in part) for part in parts]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(lengths_of, st.integers(1, 40), st.booleans())
def test_partitions_hold_each_row_once_and_none_is_empty(lengths, k, equal_size):
    k = min(k, len(lengths))
    if equal_size:
        lengths = lengths[: len(lengths) // k * k]
    parts = get_seqlen_balanced_partitions(lengths, k, equal_size)
    assert len(parts) == k
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(part == sorted(part) and part for part in parts)
    if equal_size:
        assert {len(part) for part in parts} == {len(lengths) // k}


@pytest.mark.parametrize("equal_size", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_loads_are_within_two_percent_of_the_ideal(equal_size, seed):
    lengths = np.random.default_rng(seed).integers(1, 8192, 512).tolist()
    parts = get_seqlen_balanced_partitions(lengths, 8, equal_size)
    assert max(loads(parts, lengths)) <= 1.02 * sum(lengths) / 8


def test_differencing_by_hand():
    parts = get_seqlen_balanced_partitions([8, 7, 6, 5, 4], 2, equal_size=False)
    assert sorted(loads(parts, [8, 7, 6, 5, 4])) == [14, 16]
    parts = get_seqlen_balanced_partitions([1, 2, 3, 4], 2, equal_size=True)
    assert loads(parts, [1, 2, 3, 4]) == [5, 5]


def test_rows_of_length_nothing_still_fill_every_partition():
    parts = get_seqlen_balanced_partitions([5, 0, 0, 0], 4, equal_size=False)
    assert sorted(map(len, parts)) == [1, 1, 1, 1]


def test_impossible_shares_are_refused():
    with pytest.raises(ValueError, match="use 1 to 2"):
        get_seqlen_balanced_partitions([1, 2], 3, equal_size=False)
    with pytest.raises(ValueError, match="use 1 to 2"):
        get_seqlen_balanced_partitions([1, 2], 0, equal_size=False)
    with pytest.raises(ValueError, match="multiple of 2"):
        get_seqlen_balanced_partitions([1, 2, 3], 2, equal_size=True)


def test_the_result_is_the_same_every_time():
    lengths = [5] * 20
    first = get_seqlen_balanced_partitions(lengths, 3, equal_size=False)
    assert get_seqlen_balanced_partitions(np.array(lengths), 3, equal_size=False) == first


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


def test_work_grows_linearly_and_with_the_square():
    assert calculate_workload([0, 1, 1000]) == [0, 24577, 24576 * 1000 + 1000**2]


def test_the_reverse_undoes_the_order():
    order = [3, 1, 0, 2]
    rows = ["a", "b", "c", "d"]
    moved = [rows[i] for i in order]
    assert [moved[i] for i in get_reverse_idx(order)] == rows


def test_unbalance_metrics_compare_given_order_and_partitions():
    metrics = log_seqlen_unbalance([1, 2, 3, 10], [[0, 3], [1, 2]], "global_seqlen")
    assert metrics == {
        "global_seqlen/min": 3,
        "global_seqlen/max": 13,
        "global_seqlen/minmax_diff": 10,
        "global_seqlen/balanced_min": 5,
        "global_seqlen/balanced_max": 11,
        "global_seqlen/mean": 8,
    }
