"""The engine at work: pack, forward, backward, update; the same result however the batch is cut.

One rank holds the module as it is; several ranks shard it (sharding.py). Checkpoints are in
checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hone.algorithms.aggregation import BatchCounts, counted
from hone.engine.checkpoint import load_checkpoint, save_checkpoint
from hone.engine.contract import Objective, Terms
from hone.engine.microbatch import MicroBatchRule
from hone.engine.optimizer import Optimizer
from hone.ops.packing import PackedRows, pack_rows
from hone.protocol import PADDED_ROW, DataProto


class Engine:
    """A `TrainEngine` over one module that maps packed rows to numbers a token."""

    def __init__(
        self,
        module: nn.Module,
        *,
        optimizer: Optimizer | None,
        train_rule: MicroBatchRule,
        infer_rule: MicroBatchRule,
        response_width: int,
        share_prompts: bool,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self._train_rule = train_rule
        self._infer_rule = infer_rule
        self._response_width = response_width
        self._share_prompts = share_prompts
        self._group = group
        self.data_parallel_size = dist.get_world_size(group) if group is not None else 1
        self.data_parallel_rank = dist.get_rank(group) if group is not None else 0

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def train_minibatch(self, batch: DataProto, objective: Objective) -> dict[str, float]:
        assert self.optimizer is not None, "this engine only runs forward"
        counts = self._global_counts(batch)
        if objective.needs_batch_statistics:
            outputs = self.infer(batch, **objective.options)
            batch = _with_columns(batch, objective.prepare(outputs, batch))
        self.module.train()
        totals: dict[str, float] = {}
        micros = self._micro_batches(batch, self._train_rule)
        with counted(counts):
            for _, micro in micros:
                self._forward_backward(micro, objective, counts, totals)
        totals = self._sum_over_ranks(totals)
        totals.update(self.optimizer.step())
        return totals

    def _forward_backward(
        self, micro: DataProto, objective: Objective, counts: BatchCounts, totals: dict[str, float]
    ) -> None:
        outputs = self._forward(micro, objective.options)
        terms = objective(outputs, micro)
        # Gradients are averaged over ranks, shares are meant to be summed.
        (terms.loss * self.data_parallel_size).backward()
        _accumulate(totals, terms, float(loss_mask(micro).sum()) / max(counts.tokens, 1.0))

    @torch.no_grad()
    def infer(self, batch: DataProto, **options: Any) -> dict[str, Tensor]:
        self.module.eval()
        whole: dict[str, Tensor] = {}
        for rows, micro in self._micro_batches(batch, self._infer_rule):
            for name, values in self._forward(micro, options).items():
                if name not in whole:
                    whole[name] = torch.zeros(len(batch), values.shape[1])
                whole[name][rows] = values.float().cpu()
        return whole

    def named_hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.module.named_parameters():
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            yield name.removeprefix("lm."), whole.detach()

    @contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        """Inside, every rank holds the whole parameters: for decoding with the module itself."""
        if self._group is None:
            yield
            return
        from hone.engine.sharding import gathered

        with gathered(self.module):
            yield

    def widest(self, prompt: int, response: int) -> tuple[int, int]:
        """The largest widths over all ranks: their batches are padded alike."""
        if self._group is None:
            return prompt, response
        widths = torch.tensor([prompt, response])
        dist.all_reduce(widths, dist.ReduceOp.MAX, group=self._group)
        return int(widths[0]), int(widths[1])

    def save(self, folder: Path) -> None:
        save_checkpoint(folder, self.module, self.optimizer)

    def load(self, folder: Path) -> None:
        load_checkpoint(folder, self.module, self.optimizer)

    def _forward(self, micro: DataProto, options: Mapping[str, Any]) -> dict[str, Tensor]:
        return self.module(self._pack(micro), **options)

    def _pack(self, micro: DataProto) -> PackedRows:
        columns = micro.batch
        packed = pack_rows(
            columns["prompts"],
            columns["responses"],
            columns["attention_mask"],
            columns["response_mask"],
            share_prompts=self._share_prompts,
        )
        return packed if self.device.type == "cpu" else packed.to(self.device)

    def _micro_batches(
        self, batch: DataProto, rule: MicroBatchRule
    ) -> list[tuple[list[int], DataProto]]:
        lengths = batch.batch["attention_mask"].sum(1).tolist()
        parts = rule.split(lengths)
        if self._group is not None:  # every rank must take part in every collective
            most = torch.tensor(len(parts))
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
            parts = rule.split(lengths, at_least=int(most))
        columns = batch.select(non_tensor_batch_keys=[])
        micros = [(rows, columns.select_idxs(rows)) for rows in parts]
        if self.device.type == "cpu":
            return micros
        return [(rows, micro.to(self.device)) for rows, micro in micros]

    def _global_counts(self, batch: DataProto) -> BatchCounts:
        mask = loss_mask(batch)
        counts = BatchCounts.of(mask)
        totals = self._sum_over_ranks({"tokens": counts.tokens, "sequences": counts.sequences})
        return BatchCounts(totals["tokens"], totals["sequences"], float(self._response_width))

    def _sum_over_ranks(self, values: dict[str, float]) -> dict[str, float]:
        if self._group is None:
            return values
        names = sorted(values)
        total = torch.tensor([values[name] for name in names], dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return dict(zip(names, total.tolist(), strict=True))


def loss_mask(batch: DataProto) -> Tensor:
    """What the policy loss reads: `loss_mask` where a step narrowed it, else `response_mask`."""
    name = "loss_mask" if batch.has_column("loss_mask") else "response_mask"
    mask = batch.batch[name]
    if batch.has_column(PADDED_ROW):  # rows that only even out the ranks teach nothing
        mask = mask * (1 - batch.batch[PADDED_ROW].to(mask.dtype))[:, None]
    return mask


def _with_columns(batch: DataProto, columns: Mapping[str, Tensor]) -> DataProto:
    grown = batch.select()
    for name, values in columns.items():
        grown.batch[name] = values
    return grown


def _accumulate(totals: dict[str, float], terms: Terms, weight: float) -> None:
    for name, share in terms.shares.items():
        totals[name] = totals.get(name, 0.0) + float(share)
    for name, mean in terms.means.items():
        totals[name] = totals.get(name, 0.0) + float(mean) * weight
