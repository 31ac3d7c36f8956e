"""The shards of flat buckets: which part of a parameter a rank updates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hone.config.engine import OptimConfig
from hone.engine.megatron.optimizer import BucketShard, ShardedOptimizer
from hone.plugins import PluginError


def bucket_model(rank: int) -> SimpleNamespace:
    """Returns a fake of megatron-core's DDP: one bucket of two parameters over two ranks."""
    first, second = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))
    group = SimpleNamespace(rank=lambda: rank, size=lambda: 2)
    bucket = SimpleNamespace(
        params_list=[second, first],
        offset=0,
        param_data=torch.arange(12.0),
        grad_data=torch.ones(12),
    )
    buffer = SimpleNamespace(
        data_parallel_group=group,
        buckets=[bucket],
        param_index_map={second: (0, 4, 0), first: (4, 10, 0)},
    )
    return SimpleNamespace(
        buffers=[buffer],
        expert_parallel_buffers=[],
        parameters=(first, second),
        tp_group=group,
    )


def make_optimizer(rank: int, **config) -> ShardedOptimizer:
    return ShardedOptimizer(
        bucket_model(rank), OptimConfig(**config), grad_clip=1.0, total_steps=-1
    )


@pytest.mark.parametrize(("rank", "pieces"), [(0, [(4, 0), (2, 0)]), (1, [(4, 2)])])
def test_a_parameter_may_be_on_two_shards(rank, pieces):
    (shard,) = make_optimizer(rank).shards
    actual = [
        (piece.numel(), elements.start) for _, piece, elements in shard.pieces(shard.parameters)
    ]
    assert actual == pieces


def test_full_tensors_are_scattered_to_the_shards():
    flats = []
    for rank in range(2):
        optimizer = make_optimizer(rank)
        first, second = optimizer.model.parameters
        flat = torch.zeros(6)
        optimizer.scatter(
            {first: torch.arange(6.0).view(2, 3) + 10, second: torch.arange(4.0)}, [flat]
        )
        flats.append(flat)
    assert torch.cat(flats).tolist() == [0, 1, 2, 3, 10, 11, 12, 13, 14, 15, 0, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_parameter_is_gathered_alone_from_the_ranks_that_hold_it(rank, monkeypatch):
    sent = []

    def broadcast(piece, *, group, group_src):
        sent.append((group_src, piece.numel()))
        if group_src != rank:
            piece.fill_(-1.0)

    monkeypatch.setattr("torch.distributed.broadcast", broadcast)
    optimizer = make_optimizer(rank)
    first, second = optimizer.model.parameters
    flat = torch.arange(6.0) + 6 * rank
    expected = [[4.0, 5.0, -1.0], [-1.0] * 3] if rank == 0 else [[-1.0, -1.0, 6.0], [7.0, 8.0, 9.0]]
    assert optimizer.gather(first, [flat]).tolist() == expected
    assert sent == [(0, 2), (1, 4)]
    optimizer.gather(second, [flat])
    assert sent[2:] == [(0, 4)]


def test_the_state_of_an_optimizer_is_known_before_its_first_step():
    per_element, others = make_optimizer(0).state_schema()
    assert (per_element, list(others)) == (["exp_avg", "exp_avg_sq"], ["step"])
    assert make_optimizer(0, optimizer="SGD").state_schema()[0] == []


def test_an_optimizer_over_whole_matrices_is_refused():
    with pytest.raises(PluginError, match="flat shards"):
        make_optimizer(0, optimizer="Adafactor")


def test_a_copy_of_a_tied_embedding_is_not_counted():
    optimizer = make_optimizer(1)
    first, second = optimizer.model.parameters
    first.tensor_model_parallel = second.tensor_model_parallel = True
    second.shared = True
    assert optimizer._is_counted(first)
    assert not optimizer._is_counted(second)
    assert isinstance(optimizer.shards[0], BucketShard)
