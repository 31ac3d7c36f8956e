"""Packs named tensors into buckets of bytes and unpacks them; a large tensor spans several buckets."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

_ALIGNMENT = 64


@dataclass(frozen=True)
class TensorSlice:
    """A range of a tensor's bytes, and its location in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    tensor_offset: int
    """Offset of the piece in the tensor, in bytes."""
    size: int
    """Number of bytes."""
    bucket_offset: int
    """Offset of the piece in the bucket, in bytes."""


@dataclass(frozen=True)
class Bucket:
    """The content of one transfer."""

    slices: tuple[TensorSlice, ...]
    payloads: tuple[Tensor, ...]
    """The bytes of each piece, a uint8 tensor [size]."""

    @property
    def size(self) -> int:
        """Number of bytes, with alignment."""
        last = self.slices[-1]
        return last.bucket_offset + last.size

    def write_to(self, buffer: Tensor) -> None:
        """Copies the bytes into `buffer`, a uint8 tensor of at least `size` bytes."""
        for piece, payload in zip(self.slices, self.payloads, strict=True):
            buffer[piece.bucket_offset : piece.bucket_offset + piece.size].copy_(payload)


def pack_buckets(weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Packs tensors in order; yields buckets of at most `bucket_bytes`."""
    slices: list[TensorSlice] = []
    payloads: list[Tensor] = []
    used_bytes = 0
    for name, tensor in weights:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        tensor_offset = 0
        # An empty tensor has one piece of 0 bytes.
        while tensor_offset < len(data) or (tensor_offset == 0 and len(data) == 0):
            if used_bytes >= bucket_bytes:
                yield Bucket(tuple(slices), tuple(payloads))
                slices, payloads, used_bytes = [], [], 0
            size = min(len(data) - tensor_offset, bucket_bytes - used_bytes)
            dtype = str(tensor.dtype).removeprefix("torch.")
            shape = tuple(tensor.shape)
            slices.append(TensorSlice(name, dtype, shape, tensor_offset, size, used_bytes))
            payloads.append(data[tensor_offset : tensor_offset + size])
            used_bytes = -(-(used_bytes + size) // _ALIGNMENT) * _ALIGNMENT
            tensor_offset += max(size, 1)
    if slices:
        yield Bucket(tuple(slices), tuple(payloads))


def unpack_buckets(
    buckets: Iterable[tuple[Sequence[TensorSlice], Tensor]],
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) from buckets.

    Each bucket is a pair of its slices and its bytes, a uint8 tensor of at least `Bucket.size` bytes.
    """
    incomplete_tensor: Tensor | None = None
    for slices, data in buckets:
        for piece in slices:
            dtype = getattr(torch, piece.dtype)
            payload = data[piece.bucket_offset : piece.bucket_offset + piece.size]
            nbytes = torch.Size(piece.shape).numel() * dtype.itemsize
            if piece.size == nbytes:
                yield piece.name, payload.view(dtype).reshape(piece.shape)
                continue
            if piece.tensor_offset == 0:
                incomplete_tensor = torch.empty(nbytes, dtype=torch.uint8, device=data.device)
            assert incomplete_tensor is not None, f"the first piece of {piece.name} is missing"
            end = piece.tensor_offset + piece.size
            incomplete_tensor[piece.tensor_offset : end].copy_(payload)
            if end == nbytes:
                yield piece.name, incomplete_tensor.view(dtype).reshape(piece.shape)
                incomplete_tensor = None


def serialize_slices(slices: Sequence[TensorSlice]) -> bytes:
    """Encodes slices as JSON."""
    return json.dumps([asdict(piece) for piece in slices]).encode()


def deserialize_slices(message: bytes) -> tuple[TensorSlice, ...]:
    return tuple(TensorSlice(**{**p, "shape": tuple(p["shape"])}) for p in json.loads(message))
