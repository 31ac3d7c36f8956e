"""16-bit gradients are added to float32 sums."""

from __future__ import annotations

import torch

from hone.ops.accumulate import accumulate


def test_sums_stay_float32_and_grow_by_their_parts() -> None:
    sums = [torch.full((3,), 256.0), torch.zeros(2, 2)]
    parts = [torch.full((3,), 0.5).bfloat16(), torch.ones(2, 2).bfloat16()]
    accumulate(sums, parts)
    # In 16 bits 256.5 would be rounded to 256.
    assert sums[0].tolist() == [256.5] * 3
    assert sums[1].tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_nothing_to_add_is_fine() -> None:
    accumulate([], [])
