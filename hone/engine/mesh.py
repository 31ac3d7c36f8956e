"""The mesh of the ranks: data, sequence and tensor parallel, and the process groups along its dimensions.

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
class Groups:
    """The coordinates of this rank, and the groups that it shares with other ranks."""

    mesh: Mesh
    data: dist.ProcessGroup
    """One rank per data-parallel slot; the other coordinates are equal."""
    sequence: dist.ProcessGroup | None
    """The ranks that split the sequences of a slot; None if there is one."""
    shards: DeviceMesh
    """The dimension (shard) over which FSDP2 shards, or (replicate, shard) for HSDP."""
    tensor: DeviceMesh | None
    """The ranks that split a layer's matrices, in the same root mesh as `shards`; None if there is one."""


def mesh_of(rank: int, world_size: int, *, sequence: int = 1, tensor: int = 1) -> Mesh:
    """Returns the coordinates of a rank; raises if the sizes do not divide the ranks."""
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


def check_sequence_parallel(path: str, size: int, tensor: int = 1) -> None:
    """Raises, before weights are loaded, if sequence parallel × tensor parallel does not divide the heads."""
    text = load_config(path).get_text_config()
    per_layer = config_field(text, "num_attention_heads_per_layer") or ()
    for heads in (text.num_attention_heads, *per_layer):
        if heads % (size * tensor):
            and_tensor = f" times tensor_parallel_size={tensor}" if tensor > 1 else ""
            raise UnsupportedModel(
                f"ulysses_sequence_parallel_size={size}{and_tensor} does not divide the {heads} attention "
                f"heads of {path}; use a divisor of {math.gcd(text.num_attention_heads, *per_layer)}"
            )


def check_layout(
    path: str, ranks: int, *, sequence: int, tensor: int, shard_size: int, adapters: bool
) -> None:
    """Raises, before weights are loaded, for a model that the parallel sizes cannot split."""
    if tensor > 1:
        from hone.engine.tensor_parallel import check_tensor_parallel

        shards = shard_size if shard_size > 0 else ranks // tensor
        check_tensor_parallel(load_config(path), path, tensor, adapters=adapters, shards=shards)
    if sequence > 1:
        check_sequence_parallel(path, sequence, tensor)


def join_groups(mesh: Mesh, shard_size: int, device: torch.device) -> Groups:
    """Creates the process groups of the mesh; all ranks call it together.

    `shard_size` is the number of ranks that hold one copy of the model, or -1 for data × sequence.
    """
    ranks = mesh.data_parallel_size * mesh.sequence_size
    if shard_size != -1 and (shard_size < 1 or ranks % shard_size):
        raise ValueError(
            f"fsdp_size={shard_size} does not divide {ranks} ranks; use a divisor or -1 for all"
        )
    copies = 1 if shard_size == -1 else ranks // shard_size
    dims = {"replicate": copies, "shard": ranks // copies, "tensor": mesh.tensor_size}
    names = tuple(name for name, size in dims.items() if size > 1 or name == "shard")
    root = _mesh(device, {name: dims[name] for name in names})
    fsdp_names = tuple(name for name in names if name != "tensor")
    has_tensor = mesh.tensor_size > 1
    data, sequence = dist.group.WORLD, None
    assert data is not None
    if mesh.ranks_per_slot > 1:
        shape = (mesh.data_parallel_size, mesh.sequence_size, mesh.tensor_size)
        slots = _mesh(device, dict(zip(("data", "sequence", "slot_tensor"), shape, strict=True)))
        data = slots.get_group("data")
        sequence = slots.get_group("sequence") if mesh.sequence_size > 1 else None
    return Groups(
        mesh,
        data,
        sequence,
        shards=root[fsdp_names] if has_tensor else root,
        tensor=root["tensor"] if has_tensor else None,
    )


def _mesh(device: torch.device, dims: dict[str, int]) -> DeviceMesh:
    """Creates a mesh whose groups have the timeout of the process group; torch's own is 10 or 30 minutes."""
    mesh = init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    world = dist.group.WORLD
    assert world is not None
    for name in dims:
        _set_pg_timeout(world._get_backend(device).options._timeout, mesh.get_group(name))
    return mesh
