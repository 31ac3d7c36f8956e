"""The types of a weight transfer that trainer and rollout workers share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StreamAddress:
    """The address at which rollout workers receive one stream of weights."""

    transport: str
    """memory_file, cuda_ipc, gloo or nccl."""
    endpoint: str
    """The path of a Unix socket, or host:port."""
    secret: str
    """The secret that a receiver must send, so that the sender accepts it."""
    num_receivers: int


class WeightStreamBroken(RuntimeError):
    """A weight transfer did not complete; the rollout engine must not generate."""
