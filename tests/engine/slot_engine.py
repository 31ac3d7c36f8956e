"""A fake engine on a mesh of 2 data-parallel slots, for any number of ranks; ranks of a slot repeat the work.

The engine asserts that the ranks of one slot get the same rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hone.algorithms.policy_losses.policy_loss import BatchCounts
from hone.engine.contract import EngineSpec, Mesh
from tests.engine.outside_engine import PlainEngine

SLOTS = 2


class SlotEngine(PlainEngine):
    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        size = spec.world_size // SLOTS
        slot, tensor_rank = divmod(spec.rank, size)
        self.mesh = Mesh(slot, SLOTS, tensor_rank=tensor_rank, tensor_size=size)
        ranks = range(spec.world_size)
        data_groups = [dist.new_group([r for r in ranks if r % size == i]) for i in range(size)]
        slot_groups = [dist.new_group([r for r in ranks if r // size == i]) for i in range(SLOTS)]
        self._data_group, self._slot_group = data_groups[tensor_rank], slot_groups[slot]

    def _check_same_rows(self, batch):
        by_rank = [None] * self.mesh.tensor_size
        dist.all_gather_object(by_rank, batch.batch["responses"].tolist(), self._slot_group)
        assert all(rows == by_rank[0] for rows in by_rank), "ranks of one slot got different rows"

    def train_minibatch(self, batch, objective):
        self._check_same_rows(batch)
        return super().train_minibatch(batch, objective)

    def infer(self, batch, **options):
        self._check_same_rows(batch)
        return super().infer(batch, **options)

    def _sum(self, *values):
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self._data_group)
        return total.tolist()

    def counts(self, mask):
        counts = super().counts(mask)
        return BatchCounts(*self._sum(counts.tokens, counts.sequences), self._width)

    def reduce(self, metrics):
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad, group=self._data_group)
        return dict(zip(metrics, self._sum(*metrics.values()), strict=True))
