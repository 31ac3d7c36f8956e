"""`collate_fn` joins rows to a batch."""

from __future__ import annotations

import pytest
import torch

from hone.protocol import DataProto, ProtocolError, collate_fn


def test_items_become_the_batch_they_came_from() -> None:
    data = DataProto.from_dict(
        {"x": torch.arange(4).reshape(2, 2)}, {"u": ["a", "b"], "pair": [[1, 2], [3, 4]]}
    )
    back = collate_fn([data[1], data[0]])
    assert back.batch["x"].tolist() == [[2, 3], [0, 1]]
    assert back.non_tensor_batch["u"].tolist() == ["b", "a"]
    without_tensors = DataProto.from_dict(non_tensors={"u": ["a", "b"]})
    assert collate_fn([without_tensors[0]]).batch is None


def test_items_of_different_columns_are_refused() -> None:
    one = DataProto.from_dict(non_tensors={"u": ["a"]})[0]
    other = DataProto.from_dict(non_tensors={"v": ["a"]})[0]
    with pytest.raises(ProtocolError, match="row 1 does not have the columns of row 0"):
        collate_fn([one, other])
    with pytest.raises(ProtocolError, match="empty"):
        collate_fn([])
