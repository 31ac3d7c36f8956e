"""Transfers buckets through a window of shared memory, synchronized by a socket.

The sender listens on a Unix socket in a folder that only its user can access, and gives each receiver the
window: a memory file (sent as a descriptor, so that no file name outlives the processes) or GPU memory
(CUDA IPC). The window is double-buffered: one half is filled while the other is read.
"""

from __future__ import annotations

import base64
import contextlib
import json
import mmap
import os
import secrets
import shutil
import socket
import struct
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import NotRequired, TypedDict

from hone.weights.buckets import Bucket, Piece, read, written
from hone.weights.contract import StreamAddress, WeightStreamBroken

_HALVES = 2
_LENGTH = struct.Struct("!q")
_END = b"end"


@dataclass(frozen=True)
class _Lines:
    """Length-prefixed messages over a socket."""

    socket: socket.socket
    waits_for: str

    def send(self, message: bytes) -> None:
        with self._explained():
            self.socket.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes:
        with self._explained():
            (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
            return self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        content = b""
        while len(content) < count:
            part = self.socket.recv(count - len(content))
            if not part:
                raise ConnectionResetError("the other side has gone")
            content += part
        return content

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            limit = self.socket.gettimeout()
            raise WeightStreamBroken(
                f"weights: {self.waits_for} did not answer within {limit:g} s "
                "(actor_rollout_ref.nccl_timeout)"
            ) from error
        except OSError as error:
            raise WeightStreamBroken(
                f"weights: {self.waits_for} has gone ({type(error).__name__}: {error})"
            ) from error


class _CudaHandle(TypedDict):
    """The arguments by which torch opens another process's memory; bytes are base64 text."""

    parts: list[int | dict[str, str]]
    size: int


class _Introduction(TypedDict):
    """The first message of a sender."""

    half: int
    cuda: NotRequired[_CudaHandle]


class WindowSender:
    """The sending end: `address` goes to the receivers, and `send` waits for all of them."""

    def __init__(
        self, receivers: int, *, half: int, device: torch.device, timeout_s: float
    ) -> None:
        """`half` is the size of one bucket in bytes; for a CUDA device, the window is in its memory."""
        self._half, self._receivers, self._timeout_s = half, receivers, timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="hone-weights-"))
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.settimeout(timeout_s)
        path = self._folder / "socket"
        self._listening.bind(str(path))
        self._listening.listen(receivers)
        self._token = secrets.token_hex(16)
        kind = "cuda_ipc" if device.type == "cuda" else "memory_file"
        self.address = StreamAddress(kind, str(path), self._token, receivers)
        self._device = device
        self._connected: list[_Lines] = []

    def send(self, content: Iterable[Bucket]) -> int:
        """Sends all buckets to all receivers; returns the number of bytes."""
        window, introduction, descriptor = self._open_window()
        total, number = 0, 0
        try:
            self._accept(introduction, descriptor)
            for number, bucket in enumerate(content, 1):
                if number > _HALVES:  # wait until the receivers have read this half
                    self._wait_for_all()
                start = (number - 1) % _HALVES * self._half
                bucket.write_to(window[start : start + self._half])
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                self._tell_all(written(bucket.pieces))
                total += sum(piece.size for piece in bucket.pieces)
            for _ in range(min(number, _HALVES)):
                self._wait_for_all()
            self._tell_all(_END)
            self._wait_for_all()
        finally:
            if descriptor is not None:
                os.close(descriptor)
        return total

    def close(self) -> None:
        for lines in self._connected:
            lines.socket.close()
        self._listening.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _open_window(self) -> tuple[Tensor, _Introduction, int | None]:
        size = _HALVES * self._half
        if self._device.type == "cuda":
            window = torch.empty(size, dtype=torch.uint8, device=self._device)
            shared = window.untyped_storage()._share_cuda_()
            parts = [
                {"bytes": base64.b64encode(x).decode()} if isinstance(x, bytes) else x
                for x in shared
            ]
            return window, {"half": self._half, "cuda": {"parts": parts, "size": size}}, None
        descriptor = os.memfd_create("hone-weights")
        os.ftruncate(descriptor, size)
        mapped = mmap.mmap(descriptor, size)
        return torch.frombuffer(mapped, dtype=torch.uint8), {"half": self._half}, descriptor

    def _accept(self, introduction: _Introduction, descriptor: int | None) -> None:
        while len(self._connected) < self._receivers:
            here = len(self._connected)
            try:
                connection, _ = self._listening.accept()
            except TimeoutError as error:
                raise WeightStreamBroken(
                    f"weights: {here} of {self._receivers} rollout workers came within "
                    f"{self._timeout_s:g} s (actor_rollout_ref.nccl_timeout)"
                ) from error
            connection.settimeout(self._timeout_s)
            lines = _Lines(connection, f"rollout worker {here}")
            if not secrets.compare_digest(lines.receive(), self._token.encode()):
                connection.close()
                continue
            self._connected.append(lines)
            lines.send(json.dumps(introduction).encode())
            if descriptor is not None:
                socket.send_fds(connection, [b"window"], [descriptor])

    def _tell_all(self, message: bytes) -> None:
        for lines in self._connected:
            lines.send(message)

    def _wait_for_all(self) -> None:
        for lines in self._connected:
            lines.receive()


def received_windows(
    address: StreamAddress, timeout_s: float
) -> Iterator[tuple[Sequence[Piece], Tensor]]:
    """Yields copies of a sender's buckets."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(address.place)
        except OSError as error:
            raise WeightStreamBroken(
                f"weights: the trainer's socket {address.place} cannot be reached ({error}); where "
                "trainer and rollout do not share a file system, use "
                "rollout.checkpoint_engine.backend=gloo or nccl"
            ) from error
        lines = _Lines(connection, "the trainer")
        lines.send(address.token.encode())
        introduction: _Introduction = json.loads(lines.receive())
        half = introduction["half"]
        if "cuda" in introduction:
            window = _of_cuda_handle(introduction["cuda"])
        else:
            _, descriptors, _, _ = socket.recv_fds(connection, len(b"window"), 1)
            try:
                mapped = mmap.mmap(descriptors[0], _HALVES * half)
            finally:
                os.close(descriptors[0])
            window = torch.frombuffer(mapped, dtype=torch.uint8)
        number = 0
        while (message := lines.receive()) != _END:
            pieces = read(message)
            start = number % _HALVES * half
            content = window[start : start + pieces[-1].offset + pieces[-1].size].clone()
            if content.is_cuda:
                torch.cuda.synchronize(content.device)
            lines.send(b"read")
            number += 1
            yield pieces, content
        lines.send(b"end")


def _of_cuda_handle(handle: _CudaHandle) -> Tensor:
    torch.cuda.init()  # torch opens the handle in the CUDA context of this process, which must exist
    parts = [base64.b64decode(x["bytes"]) if isinstance(x, dict) else x for x in handle["parts"]]
    storage = torch.UntypedStorage._new_shared_cuda(*parts)
    device = torch.device("cuda", int(parts[0]))
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)[: handle["size"]]
