"""The address and the error of a weight transfer, and two functions that several transports use."""

from __future__ import annotations

import base64
import socket
from dataclasses import dataclass
from datetime import timedelta

from torch import Tensor
from torch._C._distributed_c10d import TCPStore


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


def open_store(host: str, timeout: timedelta) -> TCPStore:
    """Opens a store on a free port of `host`; torch's default listens on every interface."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port, descriptor = listener.getsockname()[1], listener.detach()
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=descriptor,
    )


def share_gpu_memory(memory: Tensor) -> list[int | dict[str, str]]:
    """Returns the CUDA IPC handle of a tensor's memory; a bytes value becomes {"bytes": base64}."""
    return [
        {"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part
        for part in memory.untyped_storage()._share_cuda_()
    ]
