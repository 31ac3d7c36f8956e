"""Broadcasts weights with gloo (CPU) or NCCL (GPU); rank 0 sends, ranks 1 to R receive.

Each stream creates its own process group, independent of those of the trainer and the rollout workers.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hone.weights.buckets import Bucket, Piece, read, written
from hone.weights.contract import StreamAddress, WeightStreamBroken


class BroadcastSender:
    """Sends buckets by broadcast; listens on `host` only."""

    def __init__(
        self, receivers: int, *, host: str, device: torch.device, token: str, timeout_s: float
    ) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._store = _listening_store(host, self._timeout)
        self._device, self._receivers = device, receivers
        kind = "nccl" if device.type == "cuda" else "gloo"
        self.address = StreamAddress(kind, f"{host}:{self._store.port}", token, receivers)

    def send(self, content: Iterable[Bucket]) -> int:
        with _explained():
            group = _group(self._store, self.address, 0, self._timeout)
            total = 0
            for bucket in content:
                packed = torch.empty(bucket.size, dtype=torch.uint8, device=self._device)
                bucket.write_to(packed)
                text = torch.frombuffer(bytearray(written(bucket.pieces)), dtype=torch.uint8)
                sizes = torch.tensor([len(text), len(packed)], device=self._device)
                for part in (sizes, text.to(self._device), packed):
                    group.broadcast(part, 0).wait()
                total += sum(piece.size for piece in bucket.pieces)
            group.broadcast(torch.tensor([0, 0], device=self._device), 0).wait()
            for rank in range(1, self._receivers + 1):  # before the group is destroyed
                self._store.wait([f"{self.address.token}/read/{rank}"], self._timeout)
            return total

    def close(self) -> None:
        del self._store


def received_broadcasts(
    address: StreamAddress, rank: int, device: torch.device, timeout_s: float
) -> Iterator[tuple[Sequence[Piece], Tensor]]:
    """Yields the buckets of a sender to receiver `rank` (from 1)."""
    timeout = timedelta(seconds=timeout_s)
    host, _, port = address.place.rpartition(":")
    with _explained():
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
        group = _group(store, address, rank, timeout)
    while True:
        with _explained():
            sizes = torch.zeros(2, dtype=torch.long, device=device)
            group.broadcast(sizes, 0).wait()
            text, content = (
                torch.empty(n, dtype=torch.uint8, device=device) for n in sizes.tolist()
            )
            if len(text):
                group.broadcast(text, 0).wait()
                group.broadcast(content, 0).wait()
        if not len(text):
            break
        yield read(bytes(text.cpu().tolist())), content
    store.set(f"{address.token}/read/{rank}", "")


def _listening_store(host: str, timeout: timedelta) -> TCPStore:
    """Opens a store on a free port of `host`; torch's default listens on every interface."""
    listening = socket.create_server((host, 0))
    port, descriptor = listening.getsockname()[1], listening.detach()
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=descriptor,
    )


def _group(store: Store, address: StreamAddress, rank: int, timeout: timedelta) -> Any:
    own, size = PrefixStore(address.token, store), address.receivers + 1
    if address.transport == "gloo":
        return dist.ProcessGroupGloo(own, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(own, rank, size, options)


@contextmanager
def _explained() -> Iterator[None]:
    """Raises torch's errors as WeightStreamBroken."""
    try:
        yield
    except WeightStreamBroken:
        raise
    except (RuntimeError, dist.DistError) as error:
        raise WeightStreamBroken(f"weights: the broadcast broke off: {error}") from error
