"""Buckets of weights hold every tensor once, in order, each bucket in the memory of the one before."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.rollout.vllm_buckets import fill_buckets


def test_tensors_are_read_back_from_buckets_of_bounded_size() -> None:
    weights = {
        f"w{i}": torch.randn(size).to(kind)
        for i, (size, kind) in enumerate(
            [(10, torch.float32), (33, torch.bfloat16), (200, torch.float32), (1, torch.float16)]
        )
    }
    weights["view"] = torch.randn(4, 6).T
    read: dict[str, Tensor] = {}
    sizes, paths = [], set()
    for bucket in fill_buckets(weights.items(), torch.device("cpu"), 256):
        sizes.append(len(bucket["tensors"]))
        paths.add(bucket["path"])
        with open(bucket["path"], "rb") as file:
            content = file.read()
        for name, kind, shape, offset in bucket["tensors"]:
            dtype = getattr(torch, kind)
            count = torch.Size(shape).numel()
            part = torch.frombuffer(bytearray(content), dtype=dtype, count=count, offset=offset)
            read[name] = part.reshape(shape)
    assert sizes == [2, 1, 2]
    assert len(paths) == 1
    assert list(read) == list(weights)
    assert all(torch.equal(read[name], weights[name]) for name in weights)
