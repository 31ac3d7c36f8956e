"""Sends buckets through shared memory; messages over a Unix socket say when a bucket can be read.

The socket is in a folder that only the sender's user can access. Over the socket, each receiver gets the
memory: a memory file (by file descriptor, so that no file name outlives the processes) or GPU memory (by
CUDA IPC). The memory has two buffers for one bucket each: the sender fills one while receivers read the
other.
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
from typing import Any

import torch
from torch import Tensor

from hone.types import Fields
from hone.weights.buckets import Bucket, TensorSlice, deserialize_slices, serialize_slices
from hone.weights.contract import StreamAddress, WeightStreamBroken, share_gpu_memory

_NUM_BUFFERS = 2
_LENGTH = struct.Struct("!q")
_END_MESSAGE = b"end"
_DESCRIPTOR_MESSAGE = b"memory"
"""The message that carries the file descriptor."""


@dataclass(frozen=True)
class _Connection:
    """Length-prefixed messages over a socket."""

    socket: socket.socket
    peer: str
    """What error messages call the other process."""

    def send(self, message: bytes) -> None:
        with self._wrap_errors():
            self.socket.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes:
        with self._wrap_errors():
            (length,) = _LENGTH.unpack(self._read_exactly(_LENGTH.size))
            return self._read_exactly(length)

    def send_descriptor(self, descriptor: int) -> None:
        with self._wrap_errors():
            socket.send_fds(self.socket, [_DESCRIPTOR_MESSAGE], [descriptor])

    def receive_descriptor(self) -> int:
        with self._wrap_errors():
            _, descriptors, _, _ = socket.recv_fds(self.socket, len(_DESCRIPTOR_MESSAGE), 1)
            if not descriptors:
                raise ConnectionResetError("end of stream")
            return descriptors[0]

    def _read_exactly(self, size: int) -> bytes:
        message = b""
        while len(message) < size:
            chunk = self.socket.recv(size - len(message))
            if not chunk:
                raise ConnectionResetError("end of stream")
            message += chunk
        return message

    @contextlib.contextmanager
    def _wrap_errors(self) -> Iterator[None]:
        """Raises socket errors as WeightStreamBroken."""
        try:
            yield
        except TimeoutError as error:
            timeout_s = self.socket.gettimeout()
            raise WeightStreamBroken(
                f"weights: {self.peer} did not answer within {timeout_s:g} s "
                "(actor_rollout_ref.nccl_timeout)"
            ) from error
        except OSError as error:
            raise WeightStreamBroken(
                f"weights: {self.peer} closed the connection ({type(error).__name__}: {error})"
            ) from error


class SharedMemorySender:
    """The sender of one stream; `send` returns after every receiver has read all buckets."""

    def __init__(
        self, num_receivers: int, *, bucket_bytes: int, device: torch.device, timeout_s: float
    ) -> None:
        """Opens the socket; `send` allocates the memory, on `device` if it is a GPU."""
        self._bucket_bytes, self._num_receivers = bucket_bytes, num_receivers
        self._timeout_s = timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="hone-weights-"))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.settimeout(timeout_s)
        path = self._folder / "socket"
        with _short_path(path) as short_path:
            self._listener.bind(short_path)
        self._listener.listen(num_receivers)
        self._secret = secrets.token_hex(16)
        transport = "cuda_ipc" if device.type == "cuda" else "memory_file"
        self.address = StreamAddress(transport, str(path), self._secret, num_receivers)
        self._device = device
        self._connections: list[_Connection] = []

    def send(self, buckets: Iterable[Bucket]) -> int:
        """Sends all buckets to all receivers; returns the number of bytes."""
        memory, handshake, descriptor = self._allocate_memory()
        total_bytes, num_buckets = 0, 0
        try:
            self._accept_receivers(handshake, descriptor)
            for num_buckets, bucket in enumerate(buckets, 1):
                if num_buckets > _NUM_BUFFERS:  # all receivers must have read this buffer's bucket
                    self._wait_for_acks()
                start = (num_buckets - 1) % _NUM_BUFFERS * self._bucket_bytes  # of the buffer
                bucket.write_to(memory[start : start + self._bucket_bytes])
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                self._send_to_receivers(serialize_slices(bucket.slices))
                total_bytes += sum(tensor_slice.size for tensor_slice in bucket.slices)
            for _ in range(min(num_buckets, _NUM_BUFFERS)):
                self._wait_for_acks()
            self._send_to_receivers(_END_MESSAGE)
            self._wait_for_acks()
        finally:
            if descriptor is not None:
                os.close(descriptor)
        return total_bytes

    def close(self) -> None:
        for connection in self._connections:
            connection.socket.close()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _allocate_memory(self) -> tuple[Tensor, Fields, int | None]:
        """Returns the memory, the handshake, and the file descriptor of a memory file (None for a GPU)."""
        size = _NUM_BUFFERS * self._bucket_bytes
        handshake: Fields = {"bucket_bytes": self._bucket_bytes}
        if self._device.type == "cuda":
            memory = torch.empty(size, dtype=torch.uint8, device=self._device)
            handshake["cuda"] = share_gpu_memory(memory)
            return memory, handshake, None
        descriptor = os.memfd_create("hone-weights")
        os.ftruncate(descriptor, size)
        mapping = mmap.mmap(descriptor, size)
        return torch.frombuffer(mapping, dtype=torch.uint8), handshake, descriptor

    def _accept_receivers(self, handshake: Fields, descriptor: int | None) -> None:
        """Waits until every receiver has connected; sends each the handshake and the descriptor."""
        while len(self._connections) < self._num_receivers:
            num_connected = len(self._connections)
            try:
                client, _ = self._listener.accept()
            except TimeoutError as error:
                raise WeightStreamBroken(
                    f"weights: {num_connected} of {self._num_receivers} rollout workers connected within "
                    f"{self._timeout_s:g} s (actor_rollout_ref.nccl_timeout)"
                ) from error
            client.settimeout(self._timeout_s)
            secret, _, rank = _Connection(client, "a rollout worker").receive().partition(b" ")
            if not secrets.compare_digest(secret, self._secret.encode()):
                client.close()
                continue
            connection = _Connection(client, f"rollout worker {rank.decode()}")
            self._connections.append(connection)
            connection.send(json.dumps(handshake).encode())
            if descriptor is not None:
                connection.send_descriptor(descriptor)

    def _send_to_receivers(self, message: bytes) -> None:
        for connection in self._connections:
            connection.send(message)

    def _wait_for_acks(self) -> None:
        for connection in self._connections:
            connection.receive()


def receive_buckets(
    address: StreamAddress, rank: int, timeout_s: float
) -> Iterator[tuple[Sequence[TensorSlice], Tensor]]:
    """Connects as rollout worker `rank`; yields the slices and a copy of the bytes of each bucket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(timeout_s)
        try:
            with _short_path(Path(address.endpoint)) as path:
                client.connect(path)
        except OSError as error:
            raise WeightStreamBroken(
                f"weights: cannot connect to the trainer's socket {address.endpoint} ({error}); if "
                "trainer and rollout share no file system, use "
                "rollout.checkpoint_engine.backend=gloo or nccl"
            ) from error
        connection = _Connection(client, "the trainer")
        connection.send(f"{address.secret} {rank}".encode())
        handshake: Fields = json.loads(connection.receive())
        bucket_bytes = handshake["bucket_bytes"]
        if "cuda" in handshake:
            memory = _open_gpu_memory(handshake["cuda"])
        else:
            descriptor = connection.receive_descriptor()
            try:
                mapping = mmap.mmap(descriptor, _NUM_BUFFERS * bucket_bytes)
            finally:
                os.close(descriptor)
            memory = torch.frombuffer(mapping, dtype=torch.uint8)
        num_buckets = 0
        while (message := connection.receive()) != _END_MESSAGE:
            slices = deserialize_slices(message)
            start = num_buckets % _NUM_BUFFERS * bucket_bytes
            data = memory[start : start + slices[-1].bucket_range.stop].clone()
            if data.is_cuda:
                torch.cuda.synchronize(data.device)
            connection.send(b"ack")
            num_buckets += 1
            yield slices, data
        connection.send(b"ack")


@contextlib.contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """Yields another path of a socket: a socket's path has at most 107 bytes, and TMPDIR may be long."""
    folder_descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder_descriptor}/{path.name}"
    finally:
        os.close(folder_descriptor)


def _open_gpu_memory(handle: list[Any]) -> Tensor:
    """Returns the memory that `share_gpu_memory` shared."""
    torch.cuda.init()  # torch opens the handle in the CUDA context of this process, which must exist
    arguments = [
        base64.b64decode(value["bytes"]) if isinstance(value, dict) else value for value in handle
    ]
    storage = torch.UntypedStorage._new_shared_cuda(*arguments)
    device = torch.device("cuda", int(arguments[0]))
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
