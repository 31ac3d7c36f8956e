"""Batches as plain TensorDicts, with verl's functions: columns, metadata, rows."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from hone.protocol import ProtocolError
from hone.verl import tensordict_utils as tu

ROWS = [torch.arange(2), torch.arange(4), torch.arange(4) + 9]


def batch() -> TensorDict:
    jagged = torch.nested.as_nested_tensor(ROWS, layout=torch.jagged)
    columns = {"ids": jagged, "x": torch.arange(6.0).reshape(3, 2), "tag": ["a", ["b"], {}]}
    return tu.get_tensordict(columns, {"step": 7})


def test_columns_and_metadata_are_returned_unchanged() -> None:
    data = batch()
    assert data.batch_size == torch.Size([3])
    assert tu.get(data, "tag") == ["a", ["b"], {}]
    assert tu.get(data, "step") == data["step"] == 7
    assert tu.get(data, "nothing", 3) == 3
    assert len(tu.get_tensordict({}, {"step": 7})) == 0


@pytest.mark.parametrize(
    ("columns", "facts", "says"),
    [
        ({"a": torch.zeros(2), "b": ["x"]}, {}, "differ in their number of rows"),
        ({"a": torch.zeros(2)}, {"a": 1}, "both columns and metadata"),
        ({"a": [torch.zeros(2)]}, {}, "list of tensors"),
        ({"a": 3}, {}, "is a int"),
    ],
)
def test_columns_that_do_not_fit_are_refused(columns: dict, facts: dict, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        tu.get_tensordict(columns, facts)


def test_rows_are_selected_split_and_joined() -> None:
    data = batch()
    picked = tu.index_select_tensor_dict(data, [2, 0])
    assert picked is not None
    assert tu.get(picked, "tag") == [{}, "a"]
    assert [len(row) for row in picked["ids"].unbind()] == [4, 2]
    parts = tu.chunk_tensordict(data, 3)
    tu.assert_tensordict_eq(tu.concat_tensordict(parts), data)
    with pytest.raises(ProtocolError, match="equal parts"):
        tu.chunk_tensordict(data, 2)
    padded, added = tu.pad_to_divisor(data, 2)
    assert (len(padded), added, tu.get(padded, "tag")[-1]) == (4, 1, "a")
    tu.assert_tensordict_eq(tu.unpad(padded, added), data)


def test_a_mask_selects_the_rows_of_every_column() -> None:
    data = batch()
    tu.assert_tensordict_eq(
        tu.index_select_tensor_dict(data, torch.tensor([True, True, True])), data
    )
    for mask in ([False, True, True], np.array([False, True, True])):
        picked = tu.index_select_tensor_dict(data, mask)
        assert picked is not None
        assert [row.tolist() for row in picked["ids"].unbind()] == [[0, 1, 2, 3], [9, 10, 11, 12]]
        assert tu.get(picked, "tag") == [["b"], {}]
    empty = tu.index_select_tensor_dict(data, [])
    assert empty is not None
    assert (len(empty), len(empty["ids"].unbind()), tu.get(empty, "tag")) == (0, 0, [])


def test_no_column_is_lost_when_batches_are_joined() -> None:
    data = batch()
    fewer = data.select("x", "step")
    for batches in ([data, fewer], [fewer, data]):
        with pytest.raises(ProtocolError, match=r"\['ids', 'tag'\] are not in both"):
            tu.concat_tensordict(batches)
    with pytest.raises(ProtocolError, match="list of batches is empty"):
        tu.concat_tensordict([])
    inner = TensorDict({"inner": data.select("x")}, [3])
    assert len(tu.concat_tensordict([inner, inner])["inner", "x"]) == 6


def test_impossible_padding_is_refused() -> None:
    with pytest.raises(ProtocolError, match="multiple of 0"):
        tu.pad_to_divisor(batch(), 0)
    for rows in (-1, 4):
        with pytest.raises(ProtocolError, match=f"cannot drop {rows} padded rows"):
            tu.unpad(batch(), rows)


def test_a_ragged_dimension_stays_where_rows_are_of_one_length() -> None:
    wide = tu.nested_tensor_from_tensor_list([row.expand(3, -1) for row in ROWS])
    picked = tu.index_select_tensor_dict(tu.get_tensordict({"p": wide}), [1, 2])
    assert picked is not None
    assert picked["p"].values().shape == (3, 8)
    assert torch.equal(picked["p"][1], ROWS[2].expand(3, -1))


def test_mini_batches_come_in_an_order_that_the_seed_decides() -> None:
    data = batch()
    epochs = list(tu.make_iterator(data, 1, epochs=2))
    assert [tu.get(piece, "tag") for piece in epochs] == [["a"], [["b"]], [{}]] * 2
    one, other = (
        [p["x"][0, 0].item() for p in tu.make_iterator(data, 1, 1, 5, {"shuffle": True})]
        for _ in range(2)
    )
    assert one == other


def test_unequal_batches_differ() -> None:
    data = batch()
    for change in (
        lambda other: other["x"].add_(1),
        lambda other: tu.assign_non_tensor(other, step=8),
        lambda other: tu.assign_non_tensor(other, tag=["a", ["b"], 0]),
        lambda other: other.pop("ids"),
    ):
        other = copy.deepcopy(data)
        change(other)
        with pytest.raises(AssertionError):
            tu.assert_tensordict_eq(data, other)


def test_a_union_adds_to_the_first_and_refuses_different_values() -> None:
    data, more = batch(), tu.get_tensordict({"y": torch.ones(3)}, {"step": 7})
    assert tu.union_tensor_dict(data, more) is data
    assert {"x", "y"} <= set(data.keys())
    with pytest.raises(ProtocolError, match="'step' differs"):
        tu.union_tensor_dict(data, tu.get_tensordict({"z": torch.ones(3)}, {"step": 8}))
    assert "z" not in data.keys()  # noqa: SIM118


def test_values_are_popped_and_assigned() -> None:
    data = batch()
    with pytest.raises(KeyError, match="nothing"):
        tu.pop_keys(data, ["x", "nothing"])
    assert set(tu.pop_keys(data, ["x", "step"]).keys()) == {"x", "step"}
    assert tu.pop(data, "tag") == ["a", ["b"], {}]
    stack = NonTensorStack.from_list([NonTensorData(i) for i in range(3)])
    tu.assign_non_tensor(data, a=1, b=[1, [2], 3], c=NonTensorData(5), d=stack)
    assert [tu.get(data, name) for name in "abcd"] == [1, [1, [2], 3], 5, [0, 1, 2]]
    with pytest.raises(RuntimeError):
        tu.assign_non_tensor(data, e=[1, 2])


def test_rows_as_dicts_become_columns() -> None:
    rows = [{"x": torch.zeros(2), "r": row, "t": i} for i, row in enumerate(ROWS)]
    data = tu.list_of_dict_to_tensordict(rows)
    assert data["x"].shape == (3, 2)
    assert data["r"].is_nested
    assert tu.get(data, "t") == [0, 1, 2]
    assert tu.contiguous(data)["x"].is_contiguous()
