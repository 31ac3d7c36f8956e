"""The types that trainer and rollout share for weight transfers: stream address and stream error."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StreamAddress:
    """The address of one stream's sender, as plain data."""

    transport: str
    """memory_file, cuda_ipc, gloo or nccl."""
    place: str
    """Path of a socket, or host:port."""
    token: str
    receivers: int


class WeightStreamBroken(RuntimeError):
    """Weights arrived incomplete; the rollout engine must not generate."""
