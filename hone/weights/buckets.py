"""Packs named tensors into buckets of bytes, and unpacks buckets; a large tensor spans several buckets."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

_ALIGNMENT = 64
"""Each slice starts at a multiple of this number of bytes, so that it can be viewed as any dtype."""


@dataclass(frozen=True)
class TensorSlice:
    """A range of a tensor's bytes, and where these bytes are in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    tensor_offset: int
    """Offset of the slice in the tensor, in bytes."""
    size: int
    """Number of bytes."""
    bucket_offset: int
    """Offset of the slice in the bucket, in bytes."""

    @property
    def bucket_range(self) -> slice:
        """The indices of the bytes in the bucket."""
        return slice(self.bucket_offset, self.bucket_offset + self.size)


@dataclass(frozen=True)
class Bucket:
    """The content of one transfer."""

    slices: tuple[TensorSlice, ...]
    payloads: tuple[Tensor, ...]
    """The bytes of each slice, a uint8 tensor [size]."""

    @property
    def size(self) -> int:
        """Number of bytes, with the gaps that align the slices."""
        size: int = self.slices[-1].bucket_range.stop
        return size

    def write_to(self, buffer: Tensor) -> None:
        """Copies the bytes into `buffer`, a uint8 tensor of at least `size` bytes."""
        for tensor_slice, payload in zip(self.slices, self.payloads, strict=True):
            buffer[tensor_slice.bucket_range].copy_(payload)


def pack_buckets(weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Packs tensors in order; yields buckets of at most `bucket_bytes`."""
    slices: list[TensorSlice] = []
    payloads: list[Tensor] = []
    used_bytes = 0
    for name, tensor in weights:
        tensor_bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        tensor_offset = 0
        # An empty tensor has one slice of 0 bytes.
        while tensor_offset < len(tensor_bytes) or (tensor_offset == 0 and len(tensor_bytes) == 0):
            if used_bytes >= bucket_bytes:
                yield Bucket(tuple(slices), tuple(payloads))
                slices, payloads, used_bytes = [], [], 0
            size = min(len(tensor_bytes) - tensor_offset, bucket_bytes - used_bytes)
            dtype = str(tensor.dtype).removeprefix("torch.")
            shape = tuple(tensor.shape)
            slices.append(TensorSlice(name, dtype, shape, tensor_offset, size, used_bytes))
            payloads.append(tensor_bytes[tensor_offset : tensor_offset + size])
            used_bytes = math.ceil((used_bytes + size) / _ALIGNMENT) * _ALIGNMENT
            tensor_offset += max(size, 1)
    if slices:
        yield Bucket(tuple(slices), tuple(payloads))


def unpack_buckets(
    buckets: Iterable[tuple[Sequence[TensorSlice], Tensor]],
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) from buckets.

    Each bucket is a pair: its slices, and its bytes as a uint8 tensor of at least `Bucket.size` bytes.
    """
    incomplete_tensor: Tensor | None = None
    for slices, bucket_bytes in buckets:
        for tensor_slice in slices:
            dtype = getattr(torch, tensor_slice.dtype)
            payload = bucket_bytes[tensor_slice.bucket_range]
            nbytes = torch.Size(tensor_slice.shape).numel() * dtype.itemsize
            if tensor_slice.size == nbytes:
                yield tensor_slice.name, payload.view(dtype).reshape(tensor_slice.shape)
                continue
            if tensor_slice.tensor_offset == 0:
                incomplete_tensor = torch.empty(nbytes, dtype=torch.uint8, device=payload.device)
            assert incomplete_tensor is not None, (
                f"the first slice of {tensor_slice.name} is missing"
            )
            end = tensor_slice.tensor_offset + tensor_slice.size
            incomplete_tensor[tensor_slice.tensor_offset : end].copy_(payload)
            if end == nbytes:
                yield tensor_slice.name, incomplete_tensor.view(dtype).reshape(tensor_slice.shape)
                incomplete_tensor = None


def serialize_slices(slices: Sequence[TensorSlice]) -> bytes:
    """Encodes slices as JSON."""
    return json.dumps([asdict(tensor_slice) for tensor_slice in slices]).encode()


def deserialize_slices(message: bytes) -> tuple[TensorSlice, ...]:
    """Decodes the message of `serialize_slices`."""
    fields_of_slices = json.loads(message)
    return tuple(
        TensorSlice(**{**fields, "shape": tuple(fields["shape"])}) for fields in fields_of_slices
    )
