"""Saves and loads packed weights (a gate and an up projection in one matrix) under tensor parallel.

A rank's shard has a part of each projection, but torch.distributed.checkpoint expects one contiguous chunk
per shard. A `PackedShard` presents one chunk per projection.
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


def wrap_packed_shards(state: Any) -> Any:
    """Replaces each packed DTensor of the state by a PackedShard over the same memory."""
    if isinstance(state, DTensor) and isinstance(state.placements[-1], _StridedShard):
        return PackedShard.from_dtensor(state)
    return _map_values(wrap_packed_shards, state)


def unwrap_packed_shards(state: Any) -> Any:
    """Replaces each PackedShard of the state by its DTensor."""
    if isinstance(state, PackedShard):
        return state.dtensor
    return _map_values(unwrap_packed_shards, state)


def _map_values(function: Callable[[Any], Any], state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: function(child) for key, child in state.items()}
    if isinstance(state, list):
        return [function(child) for child in state]
    return state


class PackedShard(Tensor):
    """A rank's shard of a packed weight; implements torch's protocol `_Checkpointable`."""

    dtensor: DTensor
    chunks: dict[torch.Size, Tensor]
    """This rank's part of each projection, by the part's offsets in the full weight."""

    @staticmethod
    def from_dtensor(dtensor: DTensor) -> PackedShard:
        mesh, placement = dtensor.device_mesh, cast(_StridedShard, dtensor.placements[-1])
        dim, num_projections = placement.dim, placement.split_factor
        # The last mesh dimension is tensor parallel; these offsets are from the other dimensions only.
        placements = [*dtensor.placements[:-1], Replicate()]
        sizes, global_offsets = compute_local_shape_and_global_offset(
            dtensor.shape, mesh, placements
        )
        local_shard = dtensor.to_local().detach()
        part_size = local_shard.shape[dim] // num_projections
        assert sizes[dim] == dtensor.shape[dim], f"{dtensor.placements} split dimension {dim} twice"
        shard = Tensor._make_subclass(PackedShard, local_shard)
        shard.dtensor, shard.chunks = dtensor, {}
        tensor_rank = mesh.get_local_rank(mesh.ndim - 1)
        for index in range(num_projections if local_shard.numel() else 0):
            offsets = list(global_offsets)
            offsets[dim] = index * sizes[dim] // num_projections + tensor_rank * part_size
            shard.chunks[torch.Size(offsets)] = local_shard.narrow(
                dim, index * part_size, part_size
            )
        return shard

    def size(self) -> torch.Size:  # type: ignore[override]
        return self.dtensor.shape

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
                    self.dtensor.shape,
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.chunks[index.offset]
