"""Checkpoints of packed weights under tensor parallel: gate and up projections are separate boxes.

A rank's shard of a packed weight holds a part of each projection, and torch.distributed.checkpoint would
take the shard for one contiguous box. Here it reads and writes one box per projection, in place.
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


def with_boxes(state: Any) -> Any:
    """Returns the state with the packed shards as boxes; they share the memory of the state."""
    if isinstance(state, DTensor) and isinstance(state.placements[-1], _StridedShard):
        return PackedShard.of(state)
    return _mapped(with_boxes, state)


def without_boxes(state: Any) -> Any:
    """Returns the state with the sharded tensors in the place of their boxes."""
    return state.sharded if isinstance(state, PackedShard) else _mapped(without_boxes, state)


def _mapped(function: Callable[[Any], Any], state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: function(inner) for key, inner in state.items()}
    return [function(inner) for inner in state] if isinstance(state, list) else state


class PackedShard(Tensor):
    """A rank's shard of a packed weight, in the form of torch's `_Checkpointable`."""

    sharded: DTensor
    boxes: dict[torch.Size, Tensor]
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
        shard.sharded, shard.boxes = sharded, {}
        for index in range(packed if local.numel() else 0):
            offsets = list(start)
            offsets[dim] = index * sizes[dim] // packed + mesh.get_local_rank(mesh.ndim - 1) * part
            shard.boxes[torch.Size(offsets)] = local.narrow(dim, index * part, part)
        return shard

    def size(self) -> torch.Size:  # type: ignore[override]
        return self.sharded.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(place, box.shape) for place, box in self.boxes.items()]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk,
                    TensorProperties.create_from_tensor(self.boxes[chunk.offsets]),
                    self.sharded.shape,
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.boxes[index.offset]
