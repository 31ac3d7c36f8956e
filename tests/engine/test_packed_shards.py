"""Packed weights in a checkpoint: the chunks of all ranks contain every element once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hone.engine.packed_shards import unwrap_packed_shards, wrap_packed_shards


@pytest.fixture
def mesh_of_rank():
    """Returns the mesh (shard 2, tensor 2) as one of its ranks sees it, without communication."""

    def mesh(rank):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))

    yield mesh
    dist.destroy_process_group()


def local_shard(full_tensor, rank, dim):
    """Returns the rank's shard: experts over `shard`, a part of gate and of up over `tensor`."""
    shard_rank, tensor_rank = divmod(rank, 2)
    experts = full_tensor.chunk(2)[shard_rank]
    gate, up = (half.chunk(2, dim)[tensor_rank] for half in experts.chunk(2, dim))
    return torch.cat([gate, up], dim)


@pytest.mark.parametrize("dim", [1, 2])
def test_the_chunks_of_all_ranks_make_up_the_weight(mesh_of_rank, dim):
    full_tensor = torch.arange(3 * 8 * 12.0).view(3, 8, 12) + 1
    loaded = torch.zeros_like(full_tensor)
    for rank in range(4):
        local = local_shard(full_tensor, rank, dim)
        placements = [Shard(0), _StridedShard(dim, split_factor=2)]
        sharded = DTensor.from_local(
            local,
            mesh_of_rank(rank),
            placements,
            shape=full_tensor.shape,
            stride=full_tensor.stride(),
        )
        state = {"packed": sharded, "other": [{"count": 3}]}
        packed = wrap_packed_shards(state)
        assert packed["packed"].size() == full_tensor.shape
        for item in packed["packed"].__create_write_items__("packed", None):
            shard = packed["packed"].__get_tensor_shard__(
                MetadataIndex("packed", item.index.offset)
            )
            chunk = item.tensor_data.chunk
            pairs = zip(chunk.offsets, chunk.sizes, strict=True)
            place = tuple(slice(start, start + size) for start, size in pairs)
            loaded[place] += shard
        shard.zero_()  # loading fills the shard in place
        restored = unwrap_packed_shards(packed)
        assert restored["packed"] is sharded
        assert restored["other"] == state["other"]
        assert (local == 0).sum() == local.numel() // 2
    assert torch.equal(loaded, full_tensor)


def test_a_contiguous_shard_stays_as_it_is(mesh_of_rank):
    sharded = DTensor.from_local(torch.ones(2, 4), mesh_of_rank(0), [Shard(0), Replicate()])
    assert wrap_packed_shards({"x": sharded})["x"] is sharded
