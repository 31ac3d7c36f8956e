"""Offloads parameters and optimizer state to the host between phases.

A tensor's storage is resized to 0 and back, so that its views (fused weights of the rollout engine,
shards) stay valid. Activations are not offloaded; FSDP2's own policy is in sharding.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hone.config.engine import FSDPConfig
from hone.engine.optimizer import Optimizer, local_shard

Tensors = Callable[[], Iterable[Tensor]]

ACCELERATORS = frozenset({"cuda", "xpu", "npu"})
"""Devices with their own memory; elsewhere offloading would only copy."""


class OffloadedTensors:
    """Keeps tensors in host memory outside of `present()`."""

    def __init__(self, tensors: Tensors, devices: Iterable[str] | None = None) -> None:
        self._tensors = tensors
        self._devices = frozenset(ACCELERATORS if devices is None else devices)
        self._depth = 0
        self.reloads = 0
        """Number of moves back to the device, after which addresses may differ."""
        self._offloaded: list[
            tuple[torch.UntypedStorage, Tensor]
        ] = []  # with its bytes on the host
        self._free_buffers: dict[int, list[Tensor]] = {}  # by size; pinning new memory is slow

    @contextmanager
    def present(self) -> Iterator[None]:
        """Keeps the tensors on the device inside the block; the outermost block moves them."""
        if self._depth == 0:
            self.to_device()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.to_host()

    @torch.no_grad()
    def to_host(self) -> None:
        """Moves the tensors to the host and frees the device memory."""
        assert not self._offloaded, "already on the host"
        for storage in self._storages():  # one by one, so that a failure loses no tensor
            size, pinned = storage.nbytes(), storage.device.type == "cuda"
            free = self._free_buffers.get(size)
            host = free.pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            # Copy and release are ordered on the device's stream, so the host does not wait.
            host.copy_(_bytes(storage), non_blocking=True)
            storage.resize_(0)
            self._offloaded.append((storage, host))

    @torch.no_grad()
    def to_device(self) -> None:
        """Moves the tensors back to the device, unchanged but possibly at other addresses."""
        self.reloads += bool(self._offloaded)
        while self._offloaded:
            storage, host = self._offloaded[-1]
            storage.resize_(len(host))
            _bytes(storage).copy_(host, non_blocking=True)
            self._offloaded.pop()
            self._free_buffers.setdefault(len(host), []).append(host)

    @property
    def offloaded_bytes(self) -> int:
        return sum(len(host) for _, host in self._offloaded)

    @torch.no_grad()
    def _storages(self) -> list[torch.UntypedStorage]:
        """Returns each storage once; tied and fused tensors share one."""
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in self._tensors():
            storage = local_shard(tensor).untyped_storage()
            if storage.device.type not in self._devices or storage.nbytes() == 0:
                continue
            if not storage.resizable():  # memory-mapped from a file
                tensor.data = tensor.data.clone()
                storage = tensor.untyped_storage()
            storages.setdefault(storage.data_ptr(), storage)
        return list(storages.values())


@dataclass(frozen=True)
class Offload:
    """The offloaded tensors of one engine; None if they stay on the device."""

    parameters: OffloadedTensors | None = None
    optimizer: OffloadedTensors | None = None

    @property
    def reloads(self) -> int:
        """Number of moves of the parameters back to the device."""
        return 0 if self.parameters is None else self.parameters.reloads

    @contextmanager
    def present(self, *, optimizer: bool = False) -> Iterator[None]:
        """Keeps the parameters, and with `optimizer` its state, on the device inside the block."""
        with ExitStack() as stack:
            for tensors in (self.parameters, self.optimizer if optimizer else None):
                if tensors is not None:
                    stack.enter_context(tensors.present())
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
    devices: Iterable[str] | None = None,
) -> Offload:
    """Returns the Offload that `param_offload` and `optimizer_offload` configure."""

    def optimizer_state() -> Iterator[Tensor]:
        assert optimizer is not None
        yield from optimizer.master_copies().values()
        for values in optimizer.inner.state.values():
            yield from (value for value in values.values() if isinstance(value, Tensor))

    return Offload(
        OffloadedTensors(module.parameters, devices) if fsdp.param_offload else None,
        OffloadedTensors(optimizer_state, devices)
        if fsdp.optimizer_offload and optimizer is not None
        else None,
    )


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
