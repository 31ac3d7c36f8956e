"""Rows that continue each other."""

from __future__ import annotations

import torch

from hone.algorithms.advantages.returns import RowOrder

ROWS = torch.zeros(6, 1)
ROW_ORDER = RowOrder.from_labels(
    ["p", "p", "q", "p", "q", "p"], ["x", "y", "x", "x", "x", "x"], ROWS
)


def test_without_trajectory_ids_there_is_no_row_order():
    assert RowOrder.from_labels(["p"], None, torch.zeros(1, 1)) is None


def test_the_same_id_under_two_prompts_is_two_trajectories():
    assert ROW_ORDER.row_number.tolist() == [0, 0, 0, 1, 1, 2]
    assert ROW_ORDER.next_row.tolist() == [3, -1, 4, 5, -1, -1]


def test_without_prompts_the_id_alone_decides():
    row_order = RowOrder.from_labels(None, ["x", "y", "x"], torch.zeros(3, 1))
    assert row_order.next_row.tolist() == [2, -1, -1]


def test_sums_before_and_after_leave_the_row_itself_out():
    numbers = torch.tensor([1.0, 2, 4, 8, 16, 32])
    assert ROW_ORDER.sum_of_later_rows(numbers).tolist() == [40, 0, 16, 32, 0, 0]
    assert ROW_ORDER.sum_of_earlier_rows(numbers).tolist() == [0, 0, 0, 1, 4, 9]


def test_an_empty_batch_has_no_rows_to_visit():
    assert list(RowOrder.from_labels([], [], torch.zeros(0, 1)).backwards()) == []
