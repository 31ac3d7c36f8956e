"""The shards of flat buckets: which part of a parameter a rank updates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hone.config.engine import OptimConfig
from hone.engine.megatron.optimizer import Shard, ShardedOptimizer
from hone.plugins import PluginError


def bucket_model(rank: int) -> SimpleNamespace:
    """What the optimizer reads of megatron-core's DDP: one bucket of two parameters over two ranks."""
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


def optimizer(rank: int, **config) -> ShardedOptimizer:
    return ShardedOptimizer(bucket_model(rank), OptimConfig(**config), grad_clip=1.0, total=-1)


@pytest.mark.parametrize(("rank", "places"), [(0, [(4, 0), (2, 0)]), (1, [(4, 2)])])
def test_a_parameter_may_lie_on_two_shards(rank, places):
    (shard,) = optimizer(rank).shards
    found = [(piece.numel(), place.start) for _, piece, place in shard.pieces(shard.parameters)]
    assert found == places


def test_whole_tensors_are_cut_to_the_shards():
    flats = []
    for rank in range(2):
        made = optimizer(rank)
        first, second = made.model.parameters
        flat = torch.zeros(6)
        made.scatter({first: torch.arange(6.0).view(2, 3) + 10, second: torch.arange(4.0)}, [flat])
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
    made = optimizer(rank)
    first, second = made.model.parameters
    flat = torch.arange(6.0) + 6 * rank
    mine = [[4.0, 5.0, -1.0], [-1.0] * 3] if rank == 0 else [[-1.0, -1.0, 6.0], [7.0, 8.0, 9.0]]
    assert made.gather(first, [flat]).tolist() == mine
    assert sent == [(0, 2), (1, 4)]
    made.gather(second, [flat])
    assert sent[2:] == [(0, 4)]


def test_the_state_of_an_optimizer_is_known_before_its_first_step():
    flat, single = optimizer(0).state_keys()
    assert (flat, list(single)) == (["exp_avg", "exp_avg_sq"], ["step"])
    assert optimizer(0, optimizer="SGD").state_keys()[0] == []


def test_an_optimizer_over_whole_matrices_is_refused():
    with pytest.raises(PluginError, match="flat shards"):
        optimizer(0, optimizer="Adafactor")


def test_a_copy_of_a_tied_embedding_is_not_counted():
    made = optimizer(1)
    first, second = made.model.parameters
    first.tensor_model_parallel = second.tensor_model_parallel = True
    second.shared = True
    assert made._counts(first)
    assert not made._counts(second)
    assert isinstance(made.shards[0], Shard)
