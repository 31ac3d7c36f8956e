"""Encoding ahead: the same rows, each encoded once where the guess was right."""

from __future__ import annotations

import pytest

from hone.trainer.sft.prefetch import RowsAhead


class Rows:
    """Notes which rows were asked for; row 9 cannot be encoded."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        self.asked.append(index)
        if index == 9:
            raise ValueError("row 9 is bad")
        return {"input_ids": [index, index], "loss_mask": [0, 1]}


def test_what_was_expected_is_encoded_once_and_comes_in_order() -> None:
    rows = Rows()
    ahead = RowsAhead(rows)
    ahead.expect([3, 1, 2])
    assert [row["input_ids"][0] for row in ahead.take([3, 1, 2])] == [3, 1, 2]
    assert sorted(rows.asked) == [1, 2, 3]


def test_another_batch_than_the_expected_one_is_encoded_when_asked() -> None:
    ahead = RowsAhead(Rows())
    ahead.expect([3, 1])
    assert [row["input_ids"][0] for row in ahead.take([4, 5])] == [4, 5]


def test_a_bad_row_raises_when_it_is_taken_not_before() -> None:
    ahead = RowsAhead(Rows())
    ahead.expect([9])
    with pytest.raises(ValueError, match="row 9 is bad"):
        ahead.take([9])
