"""A fake engine on a mesh of 2 data-parallel slots, whatever the number of ranks; no rank shares work.

The ranks of one slot must be given the same rows: the engine looks, and raises where they differ.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hone.algorithms.aggregation import BatchCounts
from hone.engine.contract import EngineSpec, Mesh
from tests.engine.outside_engine import PlainEngine

SLOTS = 2


class SlotEngine(PlainEngine):
    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        each = spec.world_size // SLOTS
        slot, within = divmod(spec.rank, each)
        self.mesh = Mesh(slot, SLOTS, tensor_rank=within, tensor_size=each)
        ranks = range(spec.world_size)
        across = [dist.new_group([r for r in ranks if r % each == i]) for i in range(each)]
        inside = [dist.new_group([r for r in ranks if r // each == i]) for i in range(SLOTS)]
        self._across, self._inside = across[within], inside[slot]

    def _check_same_rows(self, batch):
        seen = [None] * self.mesh.tensor_size
        dist.all_gather_object(seen, batch.batch["responses"].tolist(), self._inside)
        assert all(rows == seen[0] for rows in seen), "ranks of one slot got different rows"

    def train_minibatch(self, batch, objective):
        self._check_same_rows(batch)
        return super().train_minibatch(batch, objective)

    def infer(self, batch, **options):
        self._check_same_rows(batch)
        return super().infer(batch, **options)

    def _sum(self, *values):
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self._across)
        return total.tolist()

    def counts(self, mask):
        counts = super().counts(mask)
        return BatchCounts(*self._sum(counts.tokens, counts.sequences), self._width)

    def reduce(self, metrics):
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad, group=self._across)
        return dict(zip(metrics, self._sum(*metrics.values()), strict=True))
