"""Shards one model over several ranks: FSDP2 over data × sequence ranks, or HSDP with replicas.

The process group is gloo on CPUs; on GPUs, NCCL transfers tensors of the model, and gloo
transfers small objects. All collectives have the timeout of the process group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from hone.config.engine import FSDPConfig
from hone.engine.contract import Mesh
from hone.engine.mesh import ProcessGroups, create_process_groups
from hone.engine.rendezvous import rendezvous_store
from hone.models.policy import Model

if TYPE_CHECKING:
    from hone.engine.tensor_parallel import TensorParallel

TIMEOUT_S = 600.0
"""Timeout of collectives in programs without a config key for the timeout (SFT, tools)."""

_ROOT_FORWARD = "enter_as_root"
"""Name of the forward method that makes the module the root of FSDP2."""


@dataclass(frozen=True)
class ShardedModule:
    """A module that is sharded over the ranks of a mesh."""

    module: nn.Module
    device: torch.device
    groups: ProcessGroups
    reshard_after_forward: bool
    tensor_parallel: TensorParallel | None = None

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gathers the full parameters on every rank inside the block."""
        # FSDP2 takes the first module that runs forward as the root, and decoding runs only submodules.
        getattr(self.module, _ROOT_FORWARD)()
        for submodule in self._fsdp_modules():
            submodule.set_reshard_after_forward(False, recurse=False)
            submodule.unshard()
        try:
            with nullcontext() if self.tensor_parallel is None else self.tensor_parallel.gathered():
                yield
        finally:
            for submodule in self._fsdp_modules():
                submodule.set_reshard_after_forward(self.reshard_after_forward, recurse=False)
                submodule.reshard()

    def reshard(self) -> None:
        """Frees the gathered parameters that a forward pass without a backward pass has left."""
        for submodule in self._fsdp_modules():
            submodule.reshard()

    def _fsdp_modules(self) -> list[FSDPModule]:
        return [m for m in self.module.modules() if isinstance(m, FSDPModule)]


def join_group(device: torch.device, timeout_s: float = TIMEOUT_S) -> None:
    """Joins the process group; later calls do nothing, so the first call's timeout applies."""
    if not dist.is_initialized():
        timeout, world_size = timedelta(seconds=timeout_s), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            rank=int(os.environ["RANK"]),
            world_size=world_size,
            timeout=timeout,
            store=rendezvous_store(world_size, timeout),
        )


def shard(module: Model, config: FSDPConfig, device: torch.device, mesh: Mesh) -> ShardedModule:
    """Shards every decoder layer and then the rest of the module, in place."""
    cpu_offload = CPUOffloadPolicy(pin_memory=device.type != "cpu")  # pinning needs a GPU
    groups = create_process_groups(mesh, config.fsdp_size, device)
    tensor_parallel = None
    if groups.tensor_mesh is not None:
        from hone.engine.tensor_parallel import TensorParallel

        tensor_parallel = TensorParallel(module, groups.tensor_mesh)
    for submodule in (*decoder_layers(module), module):
        fully_shard(
            submodule,
            mesh=groups.fsdp_mesh,
            reshard_after_forward=config.reshard_after_forward,
            # Parameters are already in the compute dtype; gradients are summed in float32.
            mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
            offload_policy=cpu_offload if config.offload_policy else OffloadPolicy(),
        )
    setattr(module, _ROOT_FORWARD, _no_op)
    register_fsdp_forward_method(module, _ROOT_FORWARD)
    return ShardedModule(module, device, groups, config.reshard_after_forward, tensor_parallel)


def _no_op() -> None:
    """Computes nothing; calling this forward method makes the module the root of FSDP2."""


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """Returns the decoder layers: the ModuleList with the most parameters, because experts are inside it."""

    def parameter_count(layers: nn.ModuleList) -> int:
        return sum(p.numel() for p in layers.parameters())

    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
    return list(sorted(lists, key=parameter_count)[-1]) if lists else []
