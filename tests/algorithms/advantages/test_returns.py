"""Rows that continue each other."""

from __future__ import annotations

import torch

from hone.algorithms.advantages.returns import Chain

ROWS = torch.zeros(6, 1)
CHAIN = Chain.of(["p", "p", "q", "p", "q", "p"], ["x", "y", "x", "x", "x", "x"], ROWS)


def test_without_trajectory_ids_there_is_no_chain():
    assert Chain.of(["p"], None, torch.zeros(1, 1)) is None


def test_the_same_id_under_two_prompts_is_two_trajectories():
    assert CHAIN.rank.tolist() == [0, 0, 0, 1, 1, 2]
    assert CHAIN.after.tolist() == [3, -1, 4, 5, -1, -1]


def test_without_prompts_the_id_alone_decides():
    chain = Chain.of(None, ["x", "y", "x"], torch.zeros(3, 1))
    assert chain.after.tolist() == [2, -1, -1]


def test_sums_before_and_after_leave_the_row_itself_out():
    numbers = torch.tensor([1.0, 2, 4, 8, 16, 32])
    assert CHAIN.later(numbers).tolist() == [40, 0, 16, 32, 0, 0]
    assert CHAIN.earlier(numbers).tolist() == [0, 0, 0, 1, 4, 9]


def test_an_empty_batch_has_no_rows_to_visit():
    assert list(Chain.of([], [], torch.zeros(0, 1)).backwards()) == []
