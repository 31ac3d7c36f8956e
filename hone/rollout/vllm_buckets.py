"""Buckets of weights in memory that vLLM's workers can open: a memory file, or GPU memory (CUDA IPC)."""

from __future__ import annotations

import base64
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from hone.rollout.server_weights import in_buckets
from hone.types import Fields

_ALIGNMENT = 64


def fill_buckets(
    weights: Iterable[tuple[str, Tensor]], device: torch.device, bucket_bytes: int
) -> Iterator[Fields]:
    """Yields the descriptions of buckets that are filled one after the other, in the same memory."""
    window = _Window(device)
    try:
        for bucket in in_buckets(weights, bucket_bytes):
            yield window.fill(list(bucket.items()))
    finally:
        window.close()


def _aligned_bytes(tensor: Tensor) -> int:
    """Returns the size of a tensor in a bucket."""
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


class _Window:
    """The memory of the buckets."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._descriptor = -1 if device.type == "cuda" else os.memfd_create("hone-vllm")
        self._memory: Tensor | None = None

    def fill(self, tensors: Sequence[tuple[str, Tensor]]) -> Fields:
        """Copies tensors into the memory; returns the arguments of `BucketInfo` in vllm_worker.py."""
        memory = self._reserve(sum(_aligned_bytes(tensor) for _, tensor in tensors))
        entries, offset = [], 0
        for name, tensor in tensors:
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            memory[offset : offset + len(data)].copy_(data)
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries.append((name, dtype, list(tensor.shape), offset))
            offset += _aligned_bytes(tensor)
        bucket: Fields = {"tensors": entries, "size": len(memory)}
        if self._device.type != "cuda":
            return bucket | {"path": f"/proc/{os.getpid()}/fd/{self._descriptor}"}
        torch.cuda.synchronize(self._device)
        handle = [
            {"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part
            for part in memory.untyped_storage()._share_cuda_()
        ]
        return bucket | {"cuda": handle}

    def _reserve(self, size: int) -> Tensor:
        if self._memory is None or len(self._memory) < size:
            if self._device.type == "cuda":
                self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
            else:
                os.ftruncate(self._descriptor, max(size, 1))
                mapped = mmap.mmap(self._descriptor, max(size, 1))
                self._memory = torch.frombuffer(mapped, dtype=torch.uint8)
        return self._memory

    def close(self) -> None:
        self._memory = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
