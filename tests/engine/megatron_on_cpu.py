"""Lets megatron-core run on the CPU; it must be imported before the engine is built (`model.external_lib`).

megatron-core names the CUDA device in many places; these patches replace it by the CPU.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import megatron.core.pipeline_parallel.schedules as schedules
import megatron.core.tensor_parallel.mappings as mappings
import megatron.core.tensor_parallel.random as megatron_random
import megatron.core.transformer.moe.moe_utils as moe_utils
import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
import torch
import torch.distributed as dist

_gather = mappings._gather_along_first_dim
_reduce_scatter = mappings._reduce_scatter_along_first_dim


class _Torch:
    """The module `torch` as a megatron-core file sees it, with zeros on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **kwargs | {"device": "cpu"})


class _Stream:
    """A stream or event whose methods do nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, other: _Stream) -> None:
        pass

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


def _on_host(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Returns the tensor as it is, since it is on the CPU already."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _gather_along_first_dim(
    tensor: torch.Tensor, group: Any, sizes: list[int] | None = None, *_: Any
) -> torch.Tensor:
    """Gathers parts of unequal sizes, which gloo does not support."""
    if sizes is None or group.size() == 1:
        return _gather(tensor, group)
    parts = [
        tensor.contiguous() if rank == group.rank() else tensor.new_empty(size, *tensor.shape[1:])
        for rank, size in enumerate(sizes)
    ]
    for rank, part in enumerate(parts):
        dist.broadcast(part, group=group, group_src=rank)
    return torch.cat(parts)


def _reduce_scatter_along_first_dim(
    tensor: torch.Tensor, group: Any, sizes: list[int] | None = None, *_: Any
) -> torch.Tensor:
    if sizes is None or group.size() == 1:
        return _reduce_scatter(tensor, group)
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total.split(sizes)[group.rank()]


def patch() -> None:
    mappings._gather_along_first_dim = _gather_along_first_dim
    mappings._reduce_scatter_along_first_dim = _reduce_scatter_along_first_dim
    token_dispatcher.maybe_move_tensor_to_cpu = _on_host
    schedules.torch = moe_utils.torch = _Torch()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.Stream = torch.cuda.current_stream = _Stream
    torch.cuda.stream = nullcontext
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


if not torch.cuda.is_available():
    patch()
