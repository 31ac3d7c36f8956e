"""Packs named tensors into buckets of bytes and unpacks them; a large tensor spans several buckets."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

_ALIGNMENT = 64


@dataclass(frozen=True)
class Piece:
    """The location of a tensor's bytes in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    tensor_offset: int
    """Offset of the piece in the tensor, in bytes."""
    size: int
    bucket_offset: int
    """Offset of the piece in the bucket, in bytes."""


@dataclass(frozen=True)
class Bucket:
    """The content of one transfer: pieces, and the bytes of each piece ([size] uint8)."""

    pieces: tuple[Piece, ...]
    payloads: tuple[Tensor, ...]

    @property
    def size(self) -> int:
        last = self.pieces[-1]
        return last.bucket_offset + last.size

    def write_to(self, buffer: Tensor) -> None:
        """Copies the bytes into `buffer`, a uint8 tensor of at least `size` bytes."""
        for piece, payload in zip(self.pieces, self.payloads, strict=True):
            buffer[piece.bucket_offset : piece.bucket_offset + piece.size].copy_(payload)


def pack_buckets(weights: Iterable[tuple[str, Tensor]], capacity: int) -> Iterator[Bucket]:
    """Yields tensors packed in order into buckets of at most `capacity` bytes."""
    pieces: list[Piece] = []
    payloads: list[Tensor] = []
    used = 0
    for name, tensor in weights:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        tensor_offset = 0
        while tensor_offset < len(data) or (tensor_offset == 0 and len(data) == 0):
            if used >= capacity:
                yield Bucket(tuple(pieces), tuple(payloads))
                pieces, payloads, used = [], [], 0
            size = min(len(data) - tensor_offset, capacity - used)
            dtype = str(tensor.dtype).removeprefix("torch.")
            pieces.append(Piece(name, dtype, tuple(tensor.shape), tensor_offset, size, used))
            payloads.append(data[tensor_offset : tensor_offset + size])
            used = -(-(used + size) // _ALIGNMENT) * _ALIGNMENT
            tensor_offset += max(size, 1)
    if pieces:
        yield Bucket(tuple(pieces), tuple(payloads))


def unpack_buckets(
    buckets: Iterable[tuple[Sequence[Piece], Tensor]],
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) from buckets.

    A bucket is its pieces and its bytes, a uint8 tensor of at least `Bucket.size` bytes.
    """
    partial: Tensor | None = None
    for pieces, data in buckets:
        for piece in pieces:
            dtype = getattr(torch, piece.dtype)
            payload = data[piece.bucket_offset : piece.bucket_offset + piece.size]
            nbytes = torch.Size(piece.shape).numel() * dtype.itemsize
            if piece.size == nbytes:
                yield piece.name, payload.view(dtype).reshape(piece.shape)
                continue
            if piece.tensor_offset == 0:
                partial = torch.empty(nbytes, dtype=torch.uint8, device=data.device)
            assert partial is not None, f"the first piece of {piece.name} is missing"
            partial[piece.tensor_offset : piece.tensor_offset + piece.size].copy_(payload)
            if piece.tensor_offset + piece.size == nbytes:
                yield piece.name, partial.view(dtype).reshape(piece.shape)
                partial = None


def serialize_pieces(pieces: Sequence[Piece]) -> bytes:
    """Returns pieces as JSON."""
    return json.dumps([asdict(piece) for piece in pieces]).encode()


def deserialize_pieces(text: bytes) -> tuple[Piece, ...]:
    return tuple(Piece(**{**p, "shape": tuple(p["shape"])}) for p in json.loads(text))
