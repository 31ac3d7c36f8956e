"""Streams the trainer's weights in buckets to rollout engines in other processes.

The transports `memory_file` and `cuda_ipc` work within one machine, `gloo` and `nccl` also across machines.
The default depends on the machines and devices of trainer and rollout workers.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hone.weights.buckets import pack_buckets, unpack_buckets
from hone.weights.collective import BroadcastSender, receive_broadcasts
from hone.weights.contract import StreamAddress, WeightStreamBroken
from hone.weights.shared_memory import SharedMemorySender, receive_buckets

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
TRANSPORTS = ("memory_file", "cuda_ipc", "gloo", "nccl")
Sender = BroadcastSender | SharedMemorySender
"""The sender of one stream."""


@dataclass(frozen=True)
class Location:
    """The machine and device of a process, which determine the transport."""

    machine: str
    """An id that two processes share if they have the same memory and the same folder for temporary files."""
    device: str
    """cpu, or the UUID of the GPU, because its index may differ between processes."""
    host: str
    """The address that other processes connect to."""

    @staticmethod
    def of_this_process(device: torch.device, host: str) -> Location:
        folder = Path(tempfile.gettempdir()).stat()
        boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else host
        device_id = device.type
        if device.type == "cuda":
            device_id = str(torch.cuda.get_device_properties(device).uuid)
        return Location(f"{boot_id}/{folder.st_dev}/{folder.st_ino}", device_id, host)


def choose_transport(trainer: Location, rollouts: Sequence[Location], backend: str) -> str:
    """Returns the transport that `checkpoint_engine.backend` names; `naive` chooses by machine and device."""
    if backend in TRANSPORTS:
        return backend
    same_machine = all(rollout.machine == trainer.machine for rollout in rollouts)
    devices = {trainer.device, *(rollout.device for rollout in rollouts)}
    if "cpu" in devices:
        return "memory_file" if same_machine else "gloo"
    return "cuda_ipc" if same_machine and len(devices) == 1 else "nccl"


def open_sender(
    transport: str,
    num_receivers: int,
    *,
    bucket_bytes: int,
    device: torch.device,
    host: str,
    timeout_s: float,
) -> Sender:
    """Opens the sender of one stream; receivers connect to its address."""
    device = device if transport in ("cuda_ipc", "nccl") else torch.device("cpu")
    if transport in ("gloo", "nccl"):
        secret = secrets.token_hex(16)
        return BroadcastSender(
            num_receivers, host=host, device=device, secret=secret, timeout_s=timeout_s
        )
    return SharedMemorySender(
        num_receivers, bucket_bytes=bucket_bytes, device=device, timeout_s=timeout_s
    )


def send(sender: Sender, weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> int:
    """Sends all tensors to all receivers and closes the sender; returns the number of bytes."""
    try:
        return sender.send(pack_buckets(weights, bucket_bytes))
    finally:
        sender.close()


def receive(
    address: StreamAddress, rank: int, device: torch.device, timeout_s: float
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of one stream to rollout worker `rank`; the caller may keep them."""
    if address.transport in ("gloo", "nccl"):
        device = device if address.transport == "nccl" else torch.device("cpu")
        yield from unpack_buckets(receive_broadcasts(address, rank + 1, device, timeout_s))
    elif address.transport in ("memory_file", "cuda_ipc"):
        yield from unpack_buckets(receive_buckets(address, rank, timeout_s))
    else:
        raise WeightStreamBroken(f"weights: no transport {address.transport!r}; use {TRANSPORTS}")
