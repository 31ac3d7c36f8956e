"""Sharing rows out over ranks: every rank gets its part of every mini-batch, and no row is lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hone.protocol import DataProto
from hone.protocol.padding import split_padded, without_padding
from hone.trainer.ppo.credit import balance


def batch_of(lengths: list[int]) -> DataProto:
    mask = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    rows = np.arange(len(lengths)).astype(object)
    return DataProto.from_dict({"attention_mask": mask}, {"row": rows})


LENGTHS = [9, 8, 1, 1, 8, 1, 7, 1, 1, 6, 1, 1]


@pytest.mark.parametrize("by_length", [True, False])
@pytest.mark.parametrize("per_update", [4, 6, 12])
def test_each_rank_holds_its_part_of_every_mini_batch(by_length: bool, per_update: int) -> None:
    shared, metrics = balance(batch_of(LENGTHS), 2, [per_update], by_length=by_length)
    rows = list(shared.non_tensor_batch["row"])
    assert sorted(rows) == list(range(12))
    for rank in range(2):
        rank_rows = rows[rank * 6 : rank * 6 + 6]
        for update in range(12 // per_update):
            part = rank_rows[update * per_update // 2 : (update + 1) * per_update // 2]
            assert {row // per_update for row in part} == {update}
    assert metrics["global_seqlen/mean"] == sum(LENGTHS) / 2


def test_every_rank_has_rows_of_each_mini_batch_if_they_do_not_divide() -> None:
    shared, _ = balance(batch_of(LENGTHS[:10]), 4, [4], by_length=True)
    parts = [without_padding(part) for part in split_padded(shared, 4)]
    updates = [sorted({int(row) // 4 for row in part.batch["global_row"]}) for part in parts]
    assert updates == [[0, 1, 2], [0, 1, 2], [0, 1], [0, 1]]


def test_by_length_the_loads_come_closer() -> None:
    _, even = balance(batch_of(LENGTHS), 2, [12], by_length=True)
    spread = even["global_seqlen/balanced_max"] - even["global_seqlen/balanced_min"]
    assert spread < even["global_seqlen/minmax_diff"]


def test_one_rank_keeps_the_order() -> None:
    shared, metrics = balance(batch_of(LENGTHS), 1, [4], by_length=True)
    assert list(shared.non_tensor_batch["row"]) == list(range(12))
    assert metrics == {}


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_row_carries_its_number_before_it_moved(ranks: int) -> None:
    shared, _ = balance(batch_of(LENGTHS), ranks, [12], by_length=True)
    assert shared.batch["global_row"].tolist() == list(shared.non_tensor_batch["row"])


def test_roles_with_mini_batches_of_different_size_all_find_even_parts() -> None:
    shared, _ = balance(batch_of(LENGTHS), 2, [12, 4], by_length=True)
    rows = list(shared.non_tensor_batch["row"])
    for first in (0, 4, 8):
        block = set(range(first, first + 4))
        assert [len(block & set(rows[:6])), len(block & set(rows[6:]))] == [2, 2]
