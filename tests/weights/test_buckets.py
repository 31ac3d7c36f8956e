"""A stream of tensors survives being cut into buckets of any size."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.weights.buckets import buckets, read, unpacked, written

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
shapes = st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=0, max_size=8),
    st.integers(1, 600),
)
def test_what_goes_in_comes_out_in_order_and_to_the_bit(specs, capacity):
    torch.manual_seed(0)
    weights = [
        (f"layer.{i}", (torch.randn(shape) * 100).to(dtype))
        for i, (shape, dtype) in enumerate(specs)
    ]
    contents = []
    for bucket in buckets(weights, capacity):
        assert bucket.size <= capacity
        window = torch.zeros(capacity, dtype=torch.uint8)
        bucket.write_to(window)
        contents.append((read(written(bucket.pieces)), window))
    back = list(unpacked(contents))
    assert [name for name, _ in back] == [name for name, _ in weights]
    for (_, before), (_, after) in zip(weights, back, strict=True):
        assert before.dtype == after.dtype
        assert before.shape == after.shape
        assert torch.equal(before, after)


def test_a_tensor_that_is_not_contiguous_travels_as_it_reads():
    weight = torch.arange(12.0).reshape(3, 4).T
    window = torch.zeros(64, dtype=torch.uint8)
    (bucket,) = buckets([("w", weight)], 64)
    bucket.write_to(window)
    assert torch.equal(dict(unpacked([(bucket.pieces, window)]))["w"], weight)
