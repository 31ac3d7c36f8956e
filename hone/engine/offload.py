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
from hone.engine.optimizer import Optimizer, local_part

Tensors = Callable[[], Iterable[Tensor]]

ACCELERATORS = frozenset({"cuda", "xpu", "npu"})
"""Devices with their own memory; elsewhere offloading would only copy."""


class HostRest:
    """Keeps tensors in host memory outside of `present()`."""

    def __init__(self, tensors: Tensors, devices: Iterable[str] | None = None) -> None:
        self._tensors = tensors
        self._devices = frozenset(ACCELERATORS if devices is None else devices)
        self._inside = 0
        self.returns = 0
        """Number of times that tensors came back, possibly to other addresses."""
        self._resting: list[tuple[torch.UntypedStorage, Tensor]] = []  # with its bytes on the host
        self._spare: dict[int, list[Tensor]] = {}  # by size; reused, because pinning memory is slow

    @contextmanager
    def present(self) -> Iterator[None]:
        """Keeps the tensors on the device inside the block; the outermost block moves them."""
        if self._inside == 0:
            self.back()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self.away()

    @torch.no_grad()
    def away(self) -> None:
        """Moves the tensors to the host and frees the device memory."""
        assert not self._resting, "already resting"
        for storage in self._storages():  # one by one, so that a failure loses no tensor
            size, pinned = storage.nbytes(), storage.device.type == "cuda"
            spare = self._spare.get(size)
            host = spare.pop() if spare else torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            # Copy and release are ordered on the device's stream, so the host does not wait.
            host.copy_(_bytes(storage), non_blocking=True)
            storage.resize_(0)
            self._resting.append((storage, host))

    @torch.no_grad()
    def back(self) -> None:
        """Moves the tensors back to the device, unchanged but possibly at other addresses."""
        self.returns += bool(self._resting)
        while self._resting:
            storage, host = self._resting[-1]
            storage.resize_(len(host))
            _bytes(storage).copy_(host, non_blocking=True)
            self._resting.pop()
            self._spare.setdefault(len(host), []).append(host)

    @property
    def bytes_resting(self) -> int:
        return sum(len(host) for _, host in self._resting)

    @torch.no_grad()
    def _storages(self) -> list[torch.UntypedStorage]:
        """Returns each storage once; tied and fused tensors share one."""
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in self._tensors():
            storage = local_part(tensor).untyped_storage()
            if storage.device.type not in self._devices or storage.nbytes() == 0:
                continue
            if not storage.resizable():  # memory-mapped from a file
                tensor.data = tensor.data.clone()
                storage = tensor.untyped_storage()
            storages.setdefault(storage.data_ptr(), storage)
        return list(storages.values())


@dataclass(frozen=True)
class Offload:
    """The offloaded tensors of one engine; None stays on the device."""

    parameters: HostRest | None = None
    optimizer: HostRest | None = None

    @property
    def returns(self) -> int:
        """Number of times that the parameters came back to the device."""
        return 0 if self.parameters is None else self.parameters.returns

    @contextmanager
    def present(self, *, optimizer: bool = False) -> Iterator[None]:
        """Keeps the parameters, and with `optimizer` its state, on the device inside the block."""
        with ExitStack() as stack:
            for rest in (self.parameters, self.optimizer if optimizer else None):
                if rest is not None:
                    stack.enter_context(rest.present())
            yield

    def start(self) -> None:
        """Offloads the tensors of a new engine, which does not compute yet."""
        for rest in (self.parameters, self.optimizer):
            if rest is not None:
                rest.away()


def offload_of(
    module: nn.Module,
    optimizer: Optimizer | None,
    fsdp: FSDPConfig,
    devices: Iterable[str] | None = None,
) -> Offload:
    """Creates the Offload of `param_offload` and `optimizer_offload`; tensors on the host stay there."""

    def state() -> Iterator[Tensor]:
        assert optimizer is not None
        yield from optimizer.own_masters().values()
        for values in optimizer.inner.state.values():
            yield from (value for value in values.values() if isinstance(value, Tensor))

    return Offload(
        HostRest(module.parameters, devices) if fsdp.param_offload else None,
        HostRest(state, devices) if fsdp.optimizer_offload and optimizer is not None else None,
    )


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
