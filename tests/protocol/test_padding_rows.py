"""Rows that make a batch divisible are copies, are marked, and can be removed."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.protocol import (
    PADDED_ROW,
    DataProto,
    DataProtoConfig,
    pad_dataproto_to_divisor,
    real_row_mask,
    split_padded,
    unpad_dataproto,
    without_padding,
)


def rows(count: int) -> DataProto:
    return DataProto.from_dict(
        {"n": torch.arange(count)}, {"uid": [f"u{i}" for i in range(count)]}, {"k": 1}
    )


def test_padding_cycles_rows_from_the_start() -> None:
    padded, pad = pad_dataproto_to_divisor(rows(3), 8)
    assert pad == 5
    assert padded.batch["n"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert unpad_dataproto(padded, pad).batch["n"].tolist() == [0, 1, 2]


def test_a_divisible_batch_is_left_alone() -> None:
    data = rows(4)
    padded, pad = pad_dataproto_to_divisor(data, 2)
    assert padded is data
    assert pad == 0
    assert unpad_dataproto(data, 0) is data


def test_an_empty_batch_is_left_alone_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _, pad = pad_dataproto_to_divisor(rows(0), 4)
    assert pad == 0
    assert "empty batch" in caplog.text


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 0"):
        pad_dataproto_to_divisor(rows(2), 0)
    with pytest.raises(ValueError, match="cannot drop 3"):
        unpad_dataproto(rows(2), 3)
    with pytest.raises(ValueError, match="into 0 parts"):
        split_padded(rows(2), 0)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 5))
def test_a_split_is_even_marked_ordered_and_reversible(count: int, parts: int) -> None:
    data = rows(count)
    pieces = split_padded(data, parts)
    assert len(pieces) == parts
    assert len({len(piece) for piece in pieces}) == 1
    real = [int(real_row_mask(piece).sum()) for piece in pieces]
    assert sum(real) == count
    assert max(real) - min(real) <= 1
    assert all(piece.has_column(PADDED_ROW) == bool(count % parts) for piece in pieces)
    back = DataProto.concat([without_padding(piece) for piece in pieces])
    assert back.column_names() == data.column_names()
    assert back.batch["n"].tolist() == list(range(count))
    assert list(back.non_tensor_batch["uid"]) == list(data.non_tensor_batch["uid"])
    assert back.meta_info == {"k": 1}


def test_a_batch_of_object_columns_is_split_too() -> None:
    pieces = split_padded(DataProto.from_dict(non_tensors={"u": ["a", "b", "c"]}), 2)
    assert [list(without_padding(piece).non_tensor_batch["u"]) for piece in pieces] == [
        ["a", "b"],
        ["c"],
    ]


def test_metadata_without_rows_goes_to_every_part() -> None:
    assert [piece.meta_info for piece in split_padded(DataProto(meta_info={"k": 1}), 3)] == [
        {"k": 1}
    ] * 3


@pytest.mark.parametrize(("which", "copied"), [("first", 0), ("last", 2)])
def test_padding_in_place_copies_one_end(which: str, copied: int) -> None:
    data = rows(3)
    data.padding(2, which)
    assert data.batch is not None
    assert data.batch["n"].tolist() == [0, 1, 2, copied, copied]
    data.padding(0)
    assert len(data) == 5


def test_padding_in_place_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="'middle'; use 'first' or 'last'"):
        rows(2).padding(1, "middle")
    with pytest.raises(ValueError, match="0 rows by 1"):
        rows(0).padding(1)


def test_a_process_may_allow_uneven_chunks_of_all_batches() -> None:
    data = DataProto.from_dict({"x": torch.arange(5)})
    assert not DataProtoConfig.auto_padding
    DataProtoConfig.auto_padding = True
    try:
        assert data.is_padding_enabled()
        assert [len(piece) for piece in data.chunk(2)] == [3, 2]
        data.meta_info[DataProtoConfig.auto_padding_key] = False
        assert not data.is_padding_enabled()
    finally:
        DataProtoConfig.auto_padding = False
    with pytest.raises(AssertionError, match="True or False"):
        DataProtoConfig.auto_padding = 1
