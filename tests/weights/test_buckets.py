"""Tensors packed into buckets of any size unpack to the same tensors."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.weights.buckets import deserialize_slices, pack_buckets, serialize_slices, unpack_buckets

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
shapes = st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=0, max_size=8),
    st.integers(1, 600),
)
def test_unpacking_returns_the_packed_tensors_in_order_and_bitwise_equal(specs, capacity):
    torch.manual_seed(0)
    weights = [
        (f"layer.{i}", (torch.randn(shape) * 100).to(dtype))
        for i, (shape, dtype) in enumerate(specs)
    ]
    buckets = []
    for bucket in pack_buckets(weights, capacity):
        assert bucket.size <= capacity
        window = torch.zeros(capacity, dtype=torch.uint8)
        bucket.write_to(window)
        buckets.append((deserialize_slices(serialize_slices(bucket.slices)), window))
    result = list(unpack_buckets(buckets))
    assert [name for name, _ in result] == [name for name, _ in weights]
    for (_, before), (_, after) in zip(weights, result, strict=True):
        assert before.dtype == after.dtype
        assert before.shape == after.shape
        assert torch.equal(before, after)


def test_a_non_contiguous_tensor_is_packed_by_its_values():
    weight = torch.arange(12.0).reshape(3, 4).T
    window = torch.zeros(64, dtype=torch.uint8)
    (bucket,) = pack_buckets([("w", weight)], 64)
    bucket.write_to(window)
    assert torch.equal(dict(unpack_buckets([(bucket.slices, window)]))["w"], weight)
