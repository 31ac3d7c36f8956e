"""Streams a trainer's tensors in buckets to rollout engines in other processes (`streamed`).

`memory_file` and `cuda_ipc` work within one machine, `gloo` and `nccl` also across machines; the default
depends on the machines and devices of both sides.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from hone.weights.buckets import Bucket, buckets, unpacked
from hone.weights.collective import BroadcastSender, received_broadcasts
from hone.weights.contract import StreamAddress, WeightStreamBroken
from hone.weights.window import WindowSender, received_windows

_BOOT = Path("/proc/sys/kernel/random/boot_id")
TRANSPORTS = ("memory_file", "cuda_ipc", "gloo", "nccl")


class Sender(Protocol):
    """The sending end of one stream."""

    address: StreamAddress

    def send(self, content: Iterable[Bucket]) -> int: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Standing:
    """The machine, device and host of a process, for the choice of a transport."""

    machine: str
    """Equal for processes that share files and memory."""
    device: str
    """cpu, or the UUID of the GPU (its index may differ between processes)."""
    host: str

    @staticmethod
    def here(device: torch.device, host: str) -> Standing:
        folder = Path(tempfile.gettempdir()).stat()
        boot = _BOOT.read_text().strip() if _BOOT.exists() else host
        name = device.type
        if device.type == "cuda":
            name = str(torch.cuda.get_device_properties(device).uuid)
        return Standing(f"{boot}/{folder.st_dev}/{folder.st_ino}", name, host)


def transport_between(trainer: Standing, rollouts: Iterable[Standing], backend: str) -> str:
    """Returns the transport of `checkpoint_engine.backend`; `naive` chooses by machine and device."""
    if backend in TRANSPORTS:
        return backend
    sides = list(rollouts)
    one_machine = all(side.machine == trainer.machine for side in sides)
    if all(side.device == trainer.device for side in sides) and one_machine:
        return "memory_file" if trainer.device == "cpu" else "cuda_ipc"
    if trainer.device == "cpu" or any(side.device == "cpu" for side in sides):
        return "memory_file" if one_machine else "gloo"
    return "nccl"


def open_sender(
    transport: str,
    receivers: int,
    *,
    bucket_bytes: int,
    device: torch.device,
    host: str,
    timeout_s: float,
) -> Sender:
    """Opens the trainer's end of one stream; its address goes to the receivers."""
    carrier = device if transport in ("cuda_ipc", "nccl") else torch.device("cpu")
    if transport in ("gloo", "nccl"):
        token = secrets.token_hex(16)
        return BroadcastSender(
            receivers, host=host, device=carrier, token=token, timeout_s=timeout_s
        )
    return WindowSender(receivers, half=bucket_bytes, device=carrier, timeout_s=timeout_s)


def send(sender: Sender, weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> int:
    """Sends all tensors to all receivers; returns the number of bytes."""
    try:
        return sender.send(buckets(weights, bucket_bytes))
    finally:
        sender.close()


def received(
    address: StreamAddress, number: int, device: torch.device, timeout_s: float
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of one stream to receiver `number` (from 0); the caller owns each tensor."""
    if address.transport in ("gloo", "nccl"):
        carrier = device if address.transport == "nccl" else torch.device("cpu")
        yield from unpacked(received_broadcasts(address, number + 1, carrier, timeout_s))
    elif address.transport in ("memory_file", "cuda_ipc"):
        yield from unpacked(received_windows(address, timeout_s))
    else:
        raise WeightStreamBroken(f"weights: no transport {address.transport!r}; use {TRANSPORTS}")
