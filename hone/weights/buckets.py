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
    start: int
    """First byte of the tensor in this bucket."""
    size: int
    offset: int
    """Offset of the bytes in the bucket."""


@dataclass(frozen=True)
class Bucket:
    """The content of one transfer: pieces, and the bytes of each piece ([size] uint8)."""

    pieces: tuple[Piece, ...]
    payloads: tuple[Tensor, ...]

    @property
    def size(self) -> int:
        last = self.pieces[-1]
        return last.offset + last.size

    def write_to(self, window: Tensor) -> None:
        """Copies the bytes into `window` [≥ size] uint8."""
        for piece, payload in zip(self.pieces, self.payloads, strict=True):
            window[piece.offset : piece.offset + piece.size].copy_(payload)


def buckets(weights: Iterable[tuple[str, Tensor]], capacity: int) -> Iterator[Bucket]:
    """Packs a stream of tensors into buckets of at most `capacity` bytes, in order."""
    pieces: list[Piece] = []
    payloads: list[Tensor] = []
    used = 0
    for name, tensor in weights:
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        start = 0
        while start < len(content) or (start == 0 and len(content) == 0):
            if used >= capacity:
                yield Bucket(tuple(pieces), tuple(payloads))
                pieces, payloads, used = [], [], 0
            size = min(len(content) - start, capacity - used)
            kind = str(tensor.dtype).removeprefix("torch.")
            pieces.append(Piece(name, kind, tuple(tensor.shape), start, size, used))
            payloads.append(content[start : start + size])
            used = -(-(used + size) // _ALIGNMENT) * _ALIGNMENT
            start += max(size, 1)
    if pieces:
        yield Bucket(tuple(pieces), tuple(payloads))


def unpacked(contents: Iterable[tuple[Sequence[Piece], Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of received buckets ([bytes] uint8 each); joins the pieces of large ones."""
    partial: Tensor | None = None
    for pieces, content in contents:
        for piece in pieces:
            dtype = getattr(torch, piece.dtype)
            part = content[piece.offset : piece.offset + piece.size]
            whole = torch.Size(piece.shape).numel() * dtype.itemsize
            if piece.size == whole:
                yield piece.name, part.view(dtype).reshape(piece.shape)
                continue
            if piece.start == 0:
                partial = torch.empty(whole, dtype=torch.uint8, device=content.device)
            assert partial is not None, f"the first piece of {piece.name} did not come"
            partial[piece.start : piece.start + piece.size].copy_(part)
            if piece.start + piece.size == whole:
                yield piece.name, partial.view(dtype).reshape(piece.shape)
                partial = None


def written(pieces: Sequence[Piece]) -> bytes:
    """Serializes pieces as JSON for the receiver."""
    return json.dumps([asdict(piece) for piece in pieces]).encode()


def read(text: bytes) -> tuple[Piece, ...]:
    return tuple(Piece(**{**p, "shape": tuple(p["shape"])}) for p in json.loads(text))
