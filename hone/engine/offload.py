"""Offloads parameters and optimizer state to the host between phases.

A tensor's storage is resized to 0 and back, so that its views (fused weights of the rollout engine,
shards) stay valid. Activations are not offloaded; sharding.py has the CPU offload policy of FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hone.config.engine import FSDPConfig
from hone.engine.optimizer import Optimizer, local_shard

TensorLister = Callable[[], Iterable[Tensor]]
"""Lists the tensors of a model or optimizer; each call may return new tensors."""

ACCELERATORS = frozenset({"cuda", "xpu", "npu"})
"""Device types with their own memory; on other devices, offloading would free nothing."""


class OffloadedTensors:
    """Keeps tensors in host memory, except inside `on_device()` blocks."""

    def __init__(
        self, list_tensors: TensorLister, device_types: Iterable[str] | None = None
    ) -> None:
        self._list_tensors = list_tensors
        self._device_types = frozenset(ACCELERATORS if device_types is None else device_types)
        self._block_depth = 0
        self.reload_count = 0
        """Number of moves back to the device; each may change the addresses."""
        self._offloaded: list[tuple[torch.UntypedStorage, Tensor]] = []
        """Pairs of a storage and the host buffer with its bytes."""
        self._free_buffers: dict[int, list[Tensor]] = {}
        """Unused host buffers by size in bytes; they are kept because pinning new memory is slow."""

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keeps the tensors on the device inside the block; the outermost block moves them."""
        if self._block_depth == 0:
            self.to_device()
        self._block_depth += 1
        try:
            yield
        finally:
            self._block_depth -= 1
            if self._block_depth == 0:
                self.to_host()

    @torch.no_grad()
    def to_host(self) -> None:
        """Moves the tensors to the host and frees the device memory."""
        assert not self._offloaded, "already on the host"
        for storage in self._storages():  # one by one, so that a failure loses no tensor
            size, is_cuda = storage.nbytes(), storage.device.type == "cuda"
            if buffers := self._free_buffers.get(size):
                host_buffer = buffers.pop()
            else:
                host_buffer = torch.empty(size, dtype=torch.uint8, pin_memory=is_cuda)
            # Copy and release are ordered on the device's stream, so the host does not wait.
            host_buffer.copy_(_byte_view(storage), non_blocking=True)
            storage.resize_(0)
            self._offloaded.append((storage, host_buffer))

    @torch.no_grad()
    def to_device(self) -> None:
        """Moves the tensors back to the device, unchanged but possibly at other addresses."""
        self.reload_count += bool(self._offloaded)
        while self._offloaded:
            storage, host_buffer = self._offloaded[-1]
            storage.resize_(len(host_buffer))
            _byte_view(storage).copy_(host_buffer, non_blocking=True)
            self._offloaded.pop()
            self._free_buffers.setdefault(len(host_buffer), []).append(host_buffer)

    @property
    def offloaded_bytes(self) -> int:
        return sum(len(host_buffer) for _, host_buffer in self._offloaded)

    @torch.no_grad()
    def _storages(self) -> list[torch.UntypedStorage]:
        """Returns the storages on the device, each once: tied and fused tensors share a storage."""
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in self._list_tensors():
            storage = local_shard(tensor).untyped_storage()
            if storage.device.type not in self._device_types or storage.nbytes() == 0:
                continue
            if not storage.resizable():  # memory-mapped from a file
                tensor.data = tensor.data.clone()
                storage = tensor.untyped_storage()
            storages.setdefault(storage.data_ptr(), storage)
        return list(storages.values())


@dataclass(frozen=True)
class Offload:
    """The offloaded tensors of one engine; None for parameters or optimizer state that stay on the device."""

    parameters: OffloadedTensors | None = None
    optimizer: OffloadedTensors | None = None

    @property
    def reload_count(self) -> int:
        """Number of moves of the parameters back to the device."""
        return 0 if self.parameters is None else self.parameters.reload_count

    @contextmanager
    def on_device(self, *, optimizer: bool = False) -> Iterator[None]:
        """Keeps the parameters, and with `optimizer` the optimizer state, on the device inside the block."""
        with ExitStack() as stack:
            for tensors in (self.parameters, self.optimizer if optimizer else None):
                if tensors is not None:
                    stack.enter_context(tensors.on_device())
            yield

    def start(self) -> None:
        """Offloads the tensors of a new engine."""
        for tensors in (self.parameters, self.optimizer):
            if tensors is not None:
                tensors.to_host()


def build_offload(
    module: nn.Module,
    optimizer: Optimizer | None,
    fsdp: FSDPConfig,
    device_types: Iterable[str] | None = None,
) -> Offload | None:
    """Returns what `param_offload` and `optimizer_offload` configure, or None if both are false."""
    if not (fsdp.param_offload or (fsdp.optimizer_offload and optimizer is not None)):
        return None

    def optimizer_state() -> Iterator[Tensor]:
        assert optimizer is not None
        yield from optimizer.master_copies().values()
        for values in optimizer.torch_optimizer.state.values():
            yield from (value for value in values.values() if isinstance(value, Tensor))

    return Offload(
        OffloadedTensors(module.parameters, device_types) if fsdp.param_offload else None,
        OffloadedTensors(optimizer_state, device_types)
        if fsdp.optimizer_offload and optimizer is not None
        else None,
    )


def _byte_view(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
