"""Broadcasts weights with gloo (CPU) or NCCL (GPU). Rank 0 sends; rollout worker i has rank i + 1.

Each stream creates a process group of its own, apart from the groups of trainer and rollout workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hone.weights.buckets import Bucket, TensorSlice, deserialize_slices, serialize_slices
from hone.weights.contract import StreamAddress, WeightStreamBroken, open_store


class BroadcastSender:
    """The sender of one stream; its store listens only on `host`."""

    def __init__(
        self, num_receivers: int, *, host: str, device: torch.device, secret: str, timeout_s: float
    ) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._store = open_store(host, self._timeout)
        self._device, self._num_receivers = device, num_receivers
        transport = "nccl" if device.type == "cuda" else "gloo"
        endpoint = f"{host}:{self._store.port}"
        self.address = StreamAddress(transport, endpoint, secret, num_receivers)
        self._group: Any = None
        """The process group; `close` drops it, so that waiting receivers get an error at once."""

    def send(self, buckets: Iterable[Bucket]) -> int:
        """Sends all buckets to all receivers; returns the number of bytes."""
        with _wrap_errors():
            self._group = _join_group(self._store, self.address, 0, self._timeout)
        total_bytes = 0
        for bucket in buckets:
            self._broadcast(bucket)
            total_bytes += sum(tensor_slice.size for tensor_slice in bucket.slices)
        with _wrap_errors():
            # A header of 0 bytes ends the stream.
            self._group.broadcast(torch.tensor([0, 0], device=self._device), 0).wait()
            # Every receiver must have received this header before the group is destroyed.
            for rank in range(1, self._num_receivers + 1):
                self._store.wait([_done_key(self.address, rank)], self._timeout)
        return total_bytes

    def close(self) -> None:
        self._group = None
        del self._store

    def _broadcast(self, bucket: Bucket) -> None:
        with _wrap_errors():
            data = torch.empty(bucket.size, dtype=torch.uint8, device=self._device)
            bucket.write_to(data)
            header = torch.frombuffer(bytearray(serialize_slices(bucket.slices)), dtype=torch.uint8)
            sizes = torch.tensor([len(header), len(data)], device=self._device)
            for message in (sizes, header.to(self._device), data):
                self._group.broadcast(message, 0).wait()


def receive_broadcasts(
    address: StreamAddress, rank: int, device: torch.device, timeout_s: float
) -> Iterator[tuple[Sequence[TensorSlice], Tensor]]:
    """Yields the slices and the bytes of each bucket to the receiver with this rank."""
    timeout = timedelta(seconds=timeout_s)
    host, _, port = address.endpoint.rpartition(":")
    with _wrap_errors():
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
        group = _join_group(store, address, rank, timeout)
    while True:
        with _wrap_errors():
            sizes = torch.zeros(2, dtype=torch.long, device=device)
            group.broadcast(sizes, 0).wait()
            header_bytes, data_bytes = sizes.tolist()
            header = torch.empty(header_bytes, dtype=torch.uint8, device=device)
            data = torch.empty(data_bytes, dtype=torch.uint8, device=device)
            if header_bytes > 0:
                group.broadcast(header, 0).wait()
                group.broadcast(data, 0).wait()
        if header_bytes == 0:
            break
        yield deserialize_slices(bytes(header.cpu().tolist())), data
    with _wrap_errors():
        store.set(_done_key(address, rank), "")


def _done_key(address: StreamAddress, rank: int) -> str:
    """Returns the key that a receiver sets in the store after it has received all buckets."""
    return f"{address.secret}/done/{rank}"


def _join_group(store: Store, address: StreamAddress, rank: int, timeout: timedelta) -> Any:
    stream_store, size = PrefixStore(address.secret, store), address.num_receivers + 1
    if address.transport == "gloo":
        return dist.ProcessGroupGloo(stream_store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(stream_store, rank, size, options)


@contextmanager
def _wrap_errors() -> Iterator[None]:
    """Raises torch's errors as WeightStreamBroken."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        first_line, _, _ = str(error).partition("\n")  # a stack of C++ frames follows
        raise WeightStreamBroken(f"weights: the broadcast failed: {first_line}") from error
