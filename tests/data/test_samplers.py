from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.data.rows import DataError
from hone.data.samplers import MixtureSampler


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(0, 3),
    st.data(),
)
def test_the_draws_so_far_have_the_share_of_each_data_set(
    sizes: list[int], epoch: int, data: st.DataObject
) -> None:
    weights = data.draw(
        st.lists(st.floats(0.05, 1), min_size=len(sizes), max_size=len(sizes)), label="weights"
    )
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    indices_by_file = [
        range(start, start + size) for start, size in zip(starts, sizes, strict=True)
    ]
    mixture = MixtureSampler(indices_by_file, weights, shuffle=True, seed=5)
    file_of_row = {
        row: file_index for file_index, indices in enumerate(indices_by_file) for row in indices
    }
    draw_counts: Counter[int] = Counter()
    for num_draws, row in enumerate(mixture.epoch_order(epoch, 60), start=1):
        draw_counts[file_of_row[row]] += 1
        for file_index, weight in enumerate(weights):
            assert abs(draw_counts[file_index] - weight / sum(weights) * num_draws) < len(weights)


def test_each_row_of_a_data_set_is_drawn_once_before_any_is_repeated() -> None:
    mixture = MixtureSampler([range(3), range(3, 10)], [0.5, 0.5], shuffle=True, seed=1)
    second_file_rows = [
        row for epoch in range(7) for row in mixture.epoch_order(epoch, 10) if row >= 3
    ]
    assert len(second_file_rows) == 35
    for pass_index in range(5):
        assert sorted(second_file_rows[pass_index * 7 : pass_index * 7 + 7]) == list(range(3, 10))


def test_a_weight_of_zero_leaves_a_data_set_out() -> None:
    mixture = MixtureSampler([range(3), range(3, 6)], [1, 0], shuffle=False, seed=None)
    assert set(mixture.epoch_order(0, 6)) == {0, 1, 2}


def test_weights_are_shares_not_probabilities() -> None:
    mixture = MixtureSampler([range(50), range(50, 100)], [3, 1], shuffle=False, seed=0)
    assert sum(row < 50 for row in mixture.epoch_order(0, 100)) == 75


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "1 numbers for 2 data files"),
        ([1.0, -1.0], "values of at least 0"),
        ([0.0, 0.0], "one above 0"),
    ],
)
def test_wrong_weights_are_named(weights: list[float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        MixtureSampler([[0], [1]], weights, shuffle=True, seed=0)


def test_a_weight_on_a_file_without_rows_is_named() -> None:
    with pytest.raises(DataError, match=r"dataset_weights\[1\]=0.5"):
        MixtureSampler([[0], []], [0.5, 0.5], shuffle=True, seed=0)
