"""Buckets of weights in memory that vLLM's workers can open: a memory file, or GPU memory by CUDA IPC."""

from __future__ import annotations

import base64
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from hone.types import Row

_ALIGNMENT = 64


def buckets(
    weights: Iterable[tuple[str, Tensor]], device: torch.device, bucket_bytes: int
) -> Iterator[Row]:
    """Fills one bucket after the other, in the same memory; a tensor may exceed `bucket_bytes`."""
    window = _Window(device)
    try:
        tensors: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in weights:
            if tensors and size + tensor.nbytes > bucket_bytes:
                yield window.filled(tensors)
                tensors, size = [], 0
            tensors.append((name, tensor.detach()))
            size += _aligned(tensor)
        if tensors:
            yield window.filled(tensors)
    finally:
        window.close()


def _aligned(tensor: Tensor) -> int:
    """Returns the bytes of a tensor in a bucket."""
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


class _Window:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._descriptor = -1 if device.type == "cuda" else os.memfd_create("hone-vllm")
        self._memory: Tensor | None = None

    def filled(self, tensors: Sequence[tuple[str, Tensor]]) -> Row:
        """Copies tensors into the memory; returns what a worker needs to read them."""
        memory = self._reserve(sum(_aligned(tensor) for _, tensor in tensors))
        entries, offset = [], 0
        for name, tensor in tensors:
            content = tensor.contiguous().reshape(-1).view(torch.uint8)
            memory[offset : offset + len(content)].copy_(content)
            kind = str(tensor.dtype).removeprefix("torch.")
            entries.append((name, kind, list(tensor.shape), offset))
            offset += _aligned(tensor)
        bucket: Row = {"tensors": entries, "size": len(memory)}
        if self._device.type != "cuda":
            return bucket | {"path": f"/proc/{os.getpid()}/fd/{self._descriptor}"}
        torch.cuda.synchronize(self._device)
        shared = memory.untyped_storage()._share_cuda_()
        parts = [
            {"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part
            for part in shared
        ]
        return bucket | {"cuda": parts}

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
