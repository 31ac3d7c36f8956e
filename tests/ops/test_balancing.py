"""Balancing: every row once, similar loads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.ops.balancing import calculate_workload, get_seqlen_balanced_partitions

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


def test_rows_of_length_0_still_fill_every_partition():
    parts = get_seqlen_balanced_partitions([5, 0, 0, 0], 4, equal_size=False)
    assert sorted(map(len, parts)) == [1, 1, 1, 1]


def test_impossible_numbers_of_partitions_are_refused():
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


def test_the_workload_has_a_linear_and_a_quadratic_term():
    assert calculate_workload([0, 1, 1000]) == [0, 24577, 24576 * 1000 + 1000**2]
