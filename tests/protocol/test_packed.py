"""Tensors are packed as tuples and bytes, in verl's format, and unpacked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from hone.protocol import (
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.randn(2, 2).to(torch.bfloat16),
        torch.empty(0, 4),
        torch.arange(6).reshape(2, 3).T,
        torch.randn(3, requires_grad=True),
    ],
    ids=lambda t: f"{t.dtype}-{list(t.shape)}",
)
def test_a_tensor_comes_back(tensor: torch.Tensor) -> None:
    dtype, shape, data = serialize_single_tensor(tensor)
    assert (dtype, shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    assert isinstance(data, np.ndarray)
    back = deserialize_single_tensor((dtype, shape, data))
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor.detach())
    assert torch.equal(deserialize_single_tensor((dtype, shape, bytes(data))), tensor.detach())


def test_what_comes_back_owns_its_memory() -> None:
    tensor = torch.zeros(2)
    back = deserialize_single_tensor(serialize_single_tensor(tensor))
    back += 1
    assert tensor.tolist() == [0, 0]


def test_a_tensordict_comes_back_with_nested_columns() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
    batch = TensorDict({"x": torch.arange(2), "j": jagged}, batch_size=[2])
    size, device, columns = serialize_tensordict(batch)
    assert (size, device, set(columns)) == ((2,), None, {"x", "j"})
    back = deserialize_tensordict((size, device, columns))
    assert torch.equal(back["x"], batch["x"])
    assert [row.tolist() for row in back["j"].unbind()] == [[1, 1], [0, 0, 0]]


def test_other_tuples_are_not_read_as_packed_tensors() -> None:
    with pytest.raises(ValueError, match="'float33' is not a torch dtype"):
        deserialize_single_tensor(("float33", (1,), b"0000"))
    with pytest.raises(ValueError, match="packed in 4 parts"):
        deserialize_tensordict(((1,), None, {"x": (1, 2, 3, 4)}))
