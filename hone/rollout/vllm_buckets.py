"""New weights for vLLM: buckets in memory that vLLM's workers can open, with one tensor per expert.

The memory is a memory file, or GPU memory that is shared by CUDA IPC.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator

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
    """Fills the same memory with one bucket after the other.

    Yields the arguments of each bucket's `BucketInfo` in vllm_worker.py.
    """
    on_gpu = device.type == "cuda"
    file_descriptor = -1 if on_gpu else os.memfd_create("hone-vllm")
    buffer = torch.empty(0, dtype=torch.uint8)
    try:
        for bucket in split_into_buckets(weights, bucket_bytes):
            tensors, size = [], 0
            for name, tensor in bucket.items():
                dtype = str(tensor.dtype).removeprefix("torch.")
                tensors.append((name, dtype, list(tensor.shape), size))
                size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            if len(buffer) < size and on_gpu:
                buffer = torch.empty(size, dtype=torch.uint8, device=device)
            elif len(buffer) < size:
                os.ftruncate(file_descriptor, size)
                buffer = torch.frombuffer(mmap.mmap(file_descriptor, size), dtype=torch.uint8)
            for (_, _, _, offset), tensor in zip(tensors, bucket.values(), strict=True):
                data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                buffer[offset : offset + len(data)].copy_(data)
            memory: Fields = {"path": f"/proc/{os.getpid()}/fd/{file_descriptor}"}
            if on_gpu:
                torch.cuda.synchronize(device)
                memory = {"cuda": share_gpu_memory(buffer)}
            yield {"tensors": tensors, "size": len(buffer), **memory}
    finally:
        if not on_gpu:
            os.close(file_descriptor)
