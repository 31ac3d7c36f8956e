"""The mesh of the ranks (data, sequence and tensor parallel) and the process groups along its dimensions.

Neighbouring ranks differ in the tensor coordinate first, then in the sequence coordinate, then in the
data-parallel slot. FSDP2 shards over data × sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from hone.engine.contract import Mesh
from hone.models.families import UnsupportedModel, config_field
from hone.models.load import load_config


@dataclass(frozen=True)
class ProcessGroups:
    """The coordinates of this rank, and the process groups and device meshes that contain it."""

    mesh: Mesh
    data: dist.ProcessGroup
    """The ranks that differ only in their data-parallel slot."""
    sequence: dist.ProcessGroup | None
    """The ranks that split the sequences of a slot; None if sequences are not split."""
    fsdp_mesh: DeviceMesh
    """The mesh over which FSDP2 shards; its dimensions are (shard), or (replicate, shard) for HSDP."""
    tensor_mesh: DeviceMesh | None
    """The mesh of the ranks that split a layer's matrices, with the root mesh of `fsdp_mesh`; None if no
    matrices are split."""


def mesh_for_rank(rank: int, world_size: int, *, sequence: int = 1, tensor: int = 1) -> Mesh:
    """Returns the coordinates of a rank; raises if the sizes do not divide the world size."""
    if world_size % (sequence * tensor):
        raise ValueError(
            f"ulysses_sequence_parallel_size={sequence} times tensor_parallel_size={tensor} does not "
            f"divide {world_size} ranks; use sizes whose product does"
        )
    data_and_sequence_rank, tensor_rank = divmod(rank, tensor)
    slot, sequence_rank = divmod(data_and_sequence_rank, sequence)
    return Mesh(
        data_parallel_rank=slot,
        data_parallel_size=world_size // (sequence * tensor),
        sequence_rank=sequence_rank,
        sequence_size=sequence,
        tensor_rank=tensor_rank,
        tensor_size=tensor,
    )


def check_sequence_parallel(path: str, sequence_size: int, tensor_size: int = 1) -> None:
    """Raises, before weights are loaded, if sequence × tensor parallel sizes do not divide the heads."""
    text_config = load_config(path).get_text_config()
    heads_per_layer = config_field(text_config, "num_attention_heads_per_layer") or ()
    for heads in (text_config.num_attention_heads, *heads_per_layer):
        if heads % (sequence_size * tensor_size):
            tensor_factor = f" times tensor_parallel_size={tensor_size}" if tensor_size > 1 else ""
            common_divisor = math.gcd(text_config.num_attention_heads, *heads_per_layer)
            raise UnsupportedModel(
                f"ulysses_sequence_parallel_size={sequence_size}{tensor_factor} does not divide the {heads} "
                f"attention heads of {path}; use a divisor of {common_divisor}"
            )


def check_layout(
    path: str,
    world_size: int,
    *,
    sequence: int,
    tensor: int,
    shard_size: int,
    adapters: bool,
) -> None:
    """Raises, before weights are loaded, for a model that the parallel sizes cannot split."""
    if tensor > 1:
        from hone.engine.tensor_parallel import check_tensor_parallel

        fsdp_shards = shard_size if shard_size > 0 else world_size // tensor
        config = load_config(path)
        check_tensor_parallel(config, path, tensor, adapters=adapters, fsdp_shards=fsdp_shards)
    if sequence > 1:
        check_sequence_parallel(path, sequence, tensor)


def create_process_groups(mesh: Mesh, shard_size: int, device: torch.device) -> ProcessGroups:
    """Creates the process groups of the mesh; all ranks must call this together.

    `shard_size` is the number of ranks that hold one copy of the model, or -1 for data × sequence.
    """
    fsdp_ranks = mesh.data_parallel_size * mesh.sequence_size
    if shard_size != -1 and (shard_size < 1 or fsdp_ranks % shard_size):
        raise ValueError(
            f"fsdp_size={shard_size} does not divide {fsdp_ranks} ranks; use a divisor, or -1 for all ranks"
        )
    replicas = 1 if shard_size == -1 else fsdp_ranks // shard_size
    sizes = {"replicate": replicas, "shard": fsdp_ranks // replicas, "tensor": mesh.tensor_size}
    names = tuple(name for name, size in sizes.items() if size > 1 or name == "shard")
    root_mesh = _create_device_mesh(device, {name: sizes[name] for name in names})
    fsdp_names = tuple(name for name in names if name != "tensor")
    has_tensor_mesh = mesh.tensor_size > 1
    data, sequence = dist.group.WORLD, None
    assert data is not None
    if mesh.ranks_per_slot > 1:
        slot_sizes = {
            "data": mesh.data_parallel_size,
            "sequence": mesh.sequence_size,
            "slot_tensor": mesh.tensor_size,
        }
        slot_mesh = _create_device_mesh(device, slot_sizes)
        data = slot_mesh.get_group("data")
        sequence = slot_mesh.get_group("sequence") if mesh.sequence_size > 1 else None
    return ProcessGroups(
        mesh,
        data,
        sequence,
        fsdp_mesh=root_mesh[fsdp_names] if has_tensor_mesh else root_mesh,
        tensor_mesh=root_mesh["tensor"] if has_tensor_mesh else None,
    )


def _create_device_mesh(device: torch.device, sizes: dict[str, int]) -> DeviceMesh:
    """Creates a mesh whose groups have the timeout of the process group, not torch's 10 or 30 minutes."""
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    world = dist.group.WORLD
    assert world is not None
    for name in sizes:
        _set_pg_timeout(world._get_backend(device).options._timeout, mesh.get_group(name))
    return mesh
