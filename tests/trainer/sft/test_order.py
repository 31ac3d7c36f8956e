"""The order of rows: whole epochs, reproducible, and resumed at any batch."""

from __future__ import annotations

import pytest

from hone.data.rows import DataError
from hone.trainer.sft.order import RowOrder


def take_batches(order: RowOrder, batches: int) -> list[list[int]]:
    return [order.next_batch() for _ in range(batches)]


def test_an_epoch_holds_every_row_once_but_the_tail_that_fills_no_batch() -> None:
    order = RowOrder(11, 3, seed=0)
    first, second = ([i for batch in take_batches(order, 3) for i in batch] for _ in range(2))
    assert len(set(first)) == len(first) == 9
    assert set(first) <= set(range(11))
    assert first != second
    assert order.epoch == 1


def test_without_shuffling_the_rows_come_as_they_are() -> None:
    assert take_batches(RowOrder(4, 2, seed=5, shuffle=False), 3) == [[0, 1], [2, 3], [0, 1]]


def test_it_resumes_after_any_batch() -> None:
    expected = take_batches(RowOrder(7, 2, seed=3), 12)
    for before in range(10):
        interrupted = RowOrder(7, 2, seed=3)
        take_batches(interrupted, before)
        resumed = RowOrder(7, 2, seed=3)
        take_batches(resumed, 5)
        resumed.load_state_dict(interrupted.state_dict())
        assert take_batches(resumed, 2) == expected[before : before + 2]


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (RowOrder(8, 2, seed=3), "number of rows"),
        (RowOrder(7, 3, seed=3), "data.train_batch_size"),
        (RowOrder(7, 2, seed=4), "data.seed"),
        (RowOrder(7, 2, seed=3, shuffle=False), "data.shuffle"),
    ],
)
def test_another_order_cannot_take_its_state(other: RowOrder, word: str) -> None:
    with pytest.raises(DataError, match=word):
        other.load_state_dict(RowOrder(7, 2, seed=3).state_dict())


def test_fewer_rows_than_a_batch_are_refused() -> None:
    with pytest.raises(DataError, match=r"data\.train_batch_size=2 or less"):
        RowOrder(2, 3, seed=0)
