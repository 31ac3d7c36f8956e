"""Batches of either form are split and joined."""

from __future__ import annotations

import pytest
import torch

from hone.protocol import BatchData, DataProto, ProtocolError


def test_batches_of_either_form_are_split_and_joined() -> None:
    proto = DataProto.from_dict({"x": torch.arange(4)})
    for data in (proto, proto.to_tensordict()):
        assert BatchData(data).is_chunkable()
        parts = BatchData(data).chunk(2)
        assert BatchData(parts).is_concatable()
        assert type(BatchData(parts).concat()) is type(data)
        assert len(BatchData(parts).concat()) == 4
    assert not BatchData([]).is_concatable()
    assert not BatchData(3).is_chunkable()
    with pytest.raises(ProtocolError, match="at least one"):
        BatchData([]).concat()
    with pytest.raises(ProtocolError, match="int cannot be split"):
        BatchData(3).chunk(2)
