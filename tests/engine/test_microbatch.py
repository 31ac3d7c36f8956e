"""The split of rows into micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.engine.microbatch import MicroBatchRule


def test_by_rows():
    assert MicroBatchRule(rows=3, tokens=1).split([9] * 7) == [[0, 1, 2], [3, 4, 5], [6]]


def test_by_tokens_fills_up_in_order():
    rule = MicroBatchRule(rows=None, tokens=10)
    assert rule.split([4, 6, 1, 10, 3, 3, 3, 3]) == [[0, 1], [2], [3], [4, 5, 6], [7]]


def test_the_error_of_a_row_beyond_the_budget_names_a_sufficient_budget():
    with pytest.raises(ValueError, match=r"11 tokens.*budget of 10.*at least 11"):
        MicroBatchRule(rows=None, tokens=10).split([3, 11])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 10), max_size=20),
    rows=st.none() | st.integers(1, 5),
    min_parts=st.integers(1, 12),
)
def test_every_row_once_in_order_within_bounds_and_enough_parts(lengths, rows, min_parts):
    parts = MicroBatchRule(rows=rows, tokens=12).split(
        lengths, [0] * len(lengths), min_parts=min_parts
    )
    assert [row for part in parts for row in part] == list(range(len(lengths)))
    assert len(parts) >= min_parts
    for part in parts:
        assert len(part) <= (rows or len(lengths))
        assert rows is not None or sum(lengths[r] for r in part) <= 12


def test_a_rank_with_too_few_rows_gets_empty_parts():
    parts = MicroBatchRule(rows=2, tokens=0).split([5, 5], min_parts=4)
    assert sorted(parts) == [[], [], [0], [1]]


def test_a_prompt_shared_with_the_row_before_is_counted_once_per_part() -> None:
    rule = MicroBatchRule(rows=None, tokens=12)
    # Prompts of 5: the second and third row cost 2 more each; the fourth begins a part and costs all.
    assert rule.split([7, 7, 7, 7, 7], [0, 5, 5, 5, 0]) == [[0, 1, 2], [3], [4]]


def test_pairs_stay_together_and_their_shared_prompt_is_counted_once() -> None:
    rule = MicroBatchRule(rows=None, tokens=20, rows_per_unit=2)
    lengths, shared = [7, 9, 5, 5, 8, 8], [0, 5, 0, 0, 0, 0]
    assert rule.split(lengths, shared) == [[0, 1], [2, 3], [4, 5]]
    assert rule.split(lengths[:4], shared[:4], min_parts=2) == [[0, 1], [2, 3]]
    assert MicroBatchRule(rows=4, tokens=0, rows_per_unit=2).split([1] * 6) == [
        [0, 1, 2, 3],
        [4, 5],
    ]
    assert MicroBatchRule(rows=1, tokens=0, rows_per_unit=2).split([1] * 4) == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="21 tokens"):
        rule.split([11, 10], [0, 0])
