"""Packed weights on disk: the boxes of all ranks hold every element once, at its place."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hone.engine.packed_shards import with_boxes, without_boxes


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


def part_of(whole, rank, dim):
    """This rank's shard: experts over `shard`, a part of gate and of up over `tensor`."""
    of_shard, of_tensor = divmod(rank, 2)
    experts = whole.chunk(2)[of_shard]
    gate, up = (half.chunk(2, dim)[of_tensor] for half in experts.chunk(2, dim))
    return torch.cat([gate, up], dim)


@pytest.mark.parametrize("dim", [1, 2])
def test_the_boxes_of_all_ranks_make_up_the_weight(mesh_of_rank, dim):
    whole = torch.arange(3 * 8 * 12.0).view(3, 8, 12) + 1
    found = torch.zeros_like(whole)
    for rank in range(4):
        local = part_of(whole, rank, dim)
        placements = [Shard(0), _StridedShard(dim, split_factor=2)]
        sharded = DTensor.from_local(
            local, mesh_of_rank(rank), placements, shape=whole.shape, stride=whole.stride()
        )
        state = {"packed": sharded, "other": [{"count": 3}]}
        boxed = with_boxes(state)
        assert boxed["packed"].size() == whole.shape
        for item in boxed["packed"].__create_write_items__("packed", None):
            box = boxed["packed"].__get_tensor_shard__(MetadataIndex("packed", item.index.offset))
            chunk = item.tensor_data.chunk
            pairs = zip(chunk.offsets, chunk.sizes, strict=True)
            place = tuple(slice(start, start + size) for start, size in pairs)
            found[place] += box
        box.zero_()  # loading fills the shard in place
        restored = without_boxes(boxed)
        assert restored["packed"] is sharded
        assert restored["other"] == state["other"]
        assert (local == 0).sum() == local.numel() // 2
    assert torch.equal(found, whole)


def test_a_contiguous_shard_stays_as_it_is(mesh_of_rank):
    sharded = DTensor.from_local(torch.ones(2, 4), mesh_of_rank(0), [Shard(0), Replicate()])
    assert with_boxes({"x": sharded})["x"] is sharded
