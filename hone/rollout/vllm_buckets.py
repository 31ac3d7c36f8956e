"""New weights for vLLM: buckets in memory that vLLM's workers can open, with one tensor per expert.

The memory is a memory file, or GPU memory that is shared by CUDA IPC.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from hone.rollout.server_weights import split_into_buckets
from hone.types import Fields
from hone.weights.contract import share_gpu_memory

_ALIGNMENT = 64
UPDATABLE_MODEL_TYPES = frozenset({"qwen3_moe"})
"""Model types with experts whose updates are tested against vLLM."""


def split_experts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields every expert as a view with its name in a checkpoint; yields other tensors unchanged.

    The trainer has one tensor for all experts of a layer; a checkpoint has one tensor per expert.
    """
    for name, tensor in weights:
        layer, _, part = name.rpartition(".experts.")
        if layer and part == "gate_up_proj":  # [experts, 2 * intermediate, hidden]
            for i, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                yield f"{layer}.experts.{i}.gate_proj.weight", gate
                yield f"{layer}.experts.{i}.up_proj.weight", up
        elif layer and part == "down_proj":  # [experts, hidden, intermediate]
            for i, expert in enumerate(tensor):
                yield f"{layer}.experts.{i}.down_proj.weight", expert
        else:
            yield name, tensor


def fill_buckets(
    weights: Iterable[tuple[str, Tensor]], device: torch.device, bucket_bytes: int
) -> Iterator[Fields]:
    """Fills the same memory with one bucket after the other; yields each one's `BucketInfo` arguments."""
    memory = _BucketMemory(device)
    try:
        for bucket in split_into_buckets(weights, bucket_bytes):
            yield memory.fill(list(bucket.items()))
    finally:
        memory.close()


def _aligned_bytes(tensor: Tensor) -> int:
    """Returns the size of a tensor in a bucket, with alignment."""
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


class _BucketMemory:
    """The memory that holds one bucket at a time: a memory file, or GPU memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._file_descriptor = -1 if device.type == "cuda" else os.memfd_create("hone-vllm")
        self._buffer: Tensor | None = None

    def fill(self, tensors: Sequence[tuple[str, Tensor]]) -> Fields:
        """Copies tensors into the memory; returns the arguments of `BucketInfo` in vllm_worker.py."""
        buffer = self._reserve(sum(_aligned_bytes(tensor) for _, tensor in tensors))
        entries, offset = [], 0
        for name, tensor in tensors:
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            buffer[offset : offset + len(data)].copy_(data)
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries.append((name, dtype, list(tensor.shape), offset))
            offset += _aligned_bytes(tensor)
        description: Fields = {"tensors": entries, "size": len(buffer)}
        if self._device.type != "cuda":
            return description | {"path": f"/proc/{os.getpid()}/fd/{self._file_descriptor}"}
        torch.cuda.synchronize(self._device)
        return description | {"cuda": share_gpu_memory(buffer)}

    def _reserve(self, size: int) -> Tensor:
        """Returns a uint8 tensor of at least `size` bytes; later buckets reuse the tensor."""
        if self._buffer is None or len(self._buffer) < size:
            if self._device.type == "cuda":
                self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            else:
                os.ftruncate(self._file_descriptor, max(size, 1))
                mapping = mmap.mmap(self._file_descriptor, max(size, 1))
                self._buffer = torch.frombuffer(mapping, dtype=torch.uint8)
        return self._buffer

    def close(self) -> None:
        self._buffer = None
        if self._file_descriptor >= 0:
            os.close(self._file_descriptor)
