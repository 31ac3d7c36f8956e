"""Micro-batches by token count under verl's names: all rows once, within the budget."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from hone.ops.dynamic_batch import (
    ceildiv,
    get_group_balanced_partitions,
    prepare_dynamic_batch,
    rearrange_micro_batches,
    restore_dynamic_batch,
    roundup_divisible,
)
from hone.protocol import DataProto

LENGTHS = [3, 9, 4, 4, 7, 1, 2, 8]


def batch() -> DataProto:
    mask = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    return DataProto.from_dict(
        {"input_ids": torch.arange(72).reshape(8, 9), "attention_mask": mask.long()}
    )


def test_micro_batches_hold_the_budget_and_can_be_put_back() -> None:
    pieces, rows = prepare_dynamic_batch(batch(), max_token_len=12)
    assert all(piece.batch["attention_mask"].sum() <= 12 for piece in pieces)
    joined = torch.cat([piece.batch["input_ids"] for piece in pieces])
    assert torch.equal(restore_dynamic_batch(joined, rows), batch().batch["input_ids"])
    with pytest.raises(AssertionError, match="row numbers"):
        restore_dynamic_batch(joined[1:], rows)


def test_rows_of_a_forced_group_stay_together_and_counts_are_kept() -> None:
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
