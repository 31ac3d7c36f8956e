"""The types of weight transfers that trainer and rollout share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StreamAddress:
    """The address of the sender of one stream."""

    transport: str
    """memory_file, cuda_ipc, gloo or nccl."""
    endpoint: str
    """Path of a socket, or host:port."""
    token: str
    """The secret by which the sender recognizes its receivers."""
    receivers: int


class WeightStreamBroken(RuntimeError):
    """A weight transfer did not complete; the rollout engine must not generate."""
