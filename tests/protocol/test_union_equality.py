"""Deep equality of the values in rows: NaN, arrays in lists, structures that contain themselves."""

from __future__ import annotations

import math
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict

from hone.protocol import deeply_equal, union_numpy_dict, union_tensor_dict

nested = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(nested)
def test_a_copy_is_the_same(value: Any) -> None:
    import copy

    assert deeply_equal(value, copy.deepcopy(value))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([1, 2], [1, 3]),
        ([1, 2], [1, 2, 3]),
        ([1, 2], (1, 2)),
        ({"a": 1}, {"b": 1}),
        ({"a": [math.nan]}, {"a": [1.0]}),
        (np.array([1.0, math.nan]), np.array([1.0, 2.0])),
        (np.array([1, 2]), np.array([[1, 2]])),
        (np.array([[1], None], dtype=object), np.array([[2], None], dtype=object)),
        (np.array(["a"]), ["a"]),
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2), np.zeros(2)),
        (torch.tensor([math.nan]), torch.tensor([1.0])),
        ("1", 1),
        (TensorDict({}, batch_size=[1]), TensorDict({}, batch_size=[2])),
    ],
)
def test_different_values_are_not_equal(first: Any, second: Any) -> None:
    assert not deeply_equal(first, second)
    assert not deeply_equal(second, first)
    assert deeply_equal(first, first)


def test_a_structure_may_contain_itself() -> None:
    one: list[Any] = [1]
    one.append(one)
    two: list[Any] = [1]
    two.append(two)
    three: list[Any] = [2]
    three.append(three)
    assert deeply_equal(one, two)
    assert not deeply_equal(one, three)


def test_a_tensordict_may_contain_itself() -> None:
    def cycle(number: int) -> dict[str, Any]:
        value: dict[str, Any] = {"number": number}
        value["batch"] = TensorDict({"x": torch.zeros(1)}, batch_size=[1])
        value["batch"]["own"] = NonTensorData(value)
        return value

    assert deeply_equal(cycle(1), cycle(1))
    assert not deeply_equal(cycle(1), cycle(2))


def test_a_mapping_of_tensors_is_compared_entry_by_entry() -> None:
    one, two = (UserDict(pixels=torch.zeros(2)) for _ in range(2))
    assert deeply_equal(one, two)
    assert not deeply_equal(one, UserDict(pixels=torch.ones(2)))


def test_nan_in_tensors_and_arrays_equals_nan() -> None:
    assert deeply_equal(torch.tensor([math.nan, 1]), torch.tensor([math.nan, 1]))
    assert deeply_equal(
        np.array([math.nan, "x"], dtype=object), np.array([float("nan"), "x"], dtype=object)
    )
    for make in (lambda: np.float32("nan"), lambda: complex("nan"), lambda: np.datetime64("NaT")):
        assert deeply_equal(make(), make())
        assert deeply_equal(np.array([make()]), np.array([make()]))
        assert not deeply_equal(make(), 1)


def test_unions_of_dicts() -> None:
    assert union_tensor_dict(None, None) is None
    assert union_numpy_dict({"a": np.zeros(1)}, {"b": np.ones(1)}).keys() == {"a", "b"}
    with pytest.raises(ValueError, match="object column 'a' differs"):
        union_numpy_dict({"a": np.zeros(1)}, {"a": np.ones(1)})
