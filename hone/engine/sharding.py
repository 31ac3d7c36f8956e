"""Several ranks, one model: FSDP2 over the data-parallel ranks, HSDP where they form copies.

The process group is gloo on CPUs and NCCL on GPUs. Every wait has the group's timeout.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from hone.config.engine import FSDPConfig

TIMEOUT_S = 600


def join_group(device: torch.device) -> dist.ProcessGroup:
    """This process's place among the ranks; joins on the first call."""
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=TIMEOUT_S),
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def shard(module: nn.Module, config: FSDPConfig, device: torch.device) -> None:
    """Shard every decoder layer, then the rest, in place."""
    options: dict[str, Any] = {
        "mesh": _mesh(config.fsdp_size, device),
        "reshard_after_forward": config.reshard_after_forward,
        # Parameters are already in the compute dtype; gradients are summed in float32.
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
    }
    if config.offload_policy:
        # Pinning needs an accelerator.
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    for layer in decoder_layers(module):
        fully_shard(layer, **options)
    fully_shard(module, **options)


def _mesh(shard_size: int, device: torch.device) -> DeviceMesh:
    world = dist.get_world_size()
    if shard_size in (-1, world):
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    if world % shard_size:
        raise ValueError(
            f"fsdp_size={shard_size} does not divide {world} ranks; use a divisor or -1 for all"
        )
    shape = (world // shard_size, shard_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks: the longest list of modules inside."""
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
    return list(max(lists, key=len)) if lists else []


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Inside, every rank holds the whole parameters and nothing reshards them."""
    sharded = [m for m in module.modules() if isinstance(m, FSDPModule)]
    for part in sharded:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in sharded:
            part.set_reshard_after_forward(True, recurse=False)
            part.reshard()
