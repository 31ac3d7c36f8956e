"""What training and rollout agree on when weights travel: where to meet, and what a broken stream is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StreamAddress:
    """Where receivers find one sender; plain data, made for one stream."""

    transport: str
    """memory_file, cuda_ipc, gloo or nccl."""
    place: str
    """Path of a socket, or host:port."""
    token: str
    receivers: int


class WeightStreamBroken(RuntimeError):
    """Weights did not arrive whole; the rollout engine must not be asked for tokens."""
