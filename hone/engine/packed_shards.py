"""Checkpoints of packed weights under tensor parallel: one chunk for gate, one for up projections.

A rank's shard of a packed weight contains a part of each projection, but torch.distributed.checkpoint
assumes one contiguous chunk per shard. Here it reads and writes one chunk per projection, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Replicate, _StridedShard


def with_chunks(state: Any) -> Any:
    """Returns the state with each packed shard as a PackedShard, which shares its memory."""
    if isinstance(state, DTensor) and isinstance(state.placements[-1], _StridedShard):
        return PackedShard.of(state)
    return _map_values(with_chunks, state)


def without_chunks(state: Any) -> Any:
    """Returns the state with the sharded tensor of each PackedShard."""
    return state.sharded if isinstance(state, PackedShard) else _map_values(without_chunks, state)


def _map_values(function: Callable[[Any], Any], state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: function(inner) for key, inner in state.items()}
    return [function(inner) for inner in state] if isinstance(state, list) else state


class PackedShard(Tensor):
    """A rank's shard of a packed weight, in the form of torch's `_Checkpointable`."""

    sharded: DTensor
    chunks: dict[torch.Size, Tensor]
    """This rank's part of each projection, by its offsets in the whole weight."""

    @staticmethod
    def of(sharded: DTensor) -> PackedShard:
        mesh, placement = sharded.device_mesh, cast(_StridedShard, sharded.placements[-1])
        dim, packed = placement.dim, placement.split_factor
        others = [*sharded.placements[:-1], Replicate()]
        sizes, start = compute_local_shape_and_global_offset(sharded.shape, mesh, others)
        local = sharded.to_local().detach()
        part = local.shape[dim] // packed
        assert sizes[dim] == sharded.shape[dim], f"{sharded.placements} split dimension {dim} twice"
        shard = Tensor._make_subclass(PackedShard, local)
        shard.sharded, shard.chunks = sharded, {}
        for index in range(packed if local.numel() else 0):
            offsets = list(start)
            offsets[dim] = index * sizes[dim] // packed + mesh.get_local_rank(mesh.ndim - 1) * part
            shard.chunks[torch.Size(offsets)] = local.narrow(dim, index * part, part)
        return shard

    def size(self) -> torch.Size:  # type: ignore[override]
        return self.sharded.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets, chunk.shape) for offsets, chunk in self.chunks.items()
        ]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk,
                    TensorProperties.create_from_tensor(self.chunks[chunk.offsets]),
                    self.sharded.shape,
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.chunks[index.offset]
