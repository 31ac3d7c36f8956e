"""Implements the steps of SFT over shuffled, packed rows; the task defines the data and the loss.

Each rank trains on its part of every batch. run.py has the loop, the run folder, checkpoints and trackers.
"""

from __future__ import annotations

from collections.abc import Callable

from hone.data.encoded import EncodedRow
from hone.engine.contract import TrainEngine
from hone.ops.balancing import get_seqlen_balanced_partitions
from hone.protocol import DataProto
from hone.trainer.ranks import sum_over_ranks
from hone.trainer.sft.order import RowOrder, check_divisible
from hone.trainer.sft.tasks import EncodedRows, SupervisedTask, Task


class SFTTrainer:
    """Trains an engine on a task: by default, next-token prediction."""

    def __init__(
        self,
        engine: TrainEngine,
        rows: EncodedRows,
        *,
        pad_token_id: int,
        rows_per_batch: int,
        seed: int,
        shuffle: bool = True,
        balance_tokens: bool = True,
        task: Task | None = None,
    ) -> None:
        check_divisible(rows_per_batch, engine.mesh.data_parallel_size)
        self.engine = engine
        self._task = task or SupervisedTask()
        self.rows = rows
        self._pad_token_id = pad_token_id
        self._balance_tokens = balance_tokens
        self.order = RowOrder(len(rows), rows_per_batch, seed=seed, shuffle=shuffle)
        self.step_number = 0

    def step(self) -> dict[str, float]:
        """Trains on the next batch, and returns its metrics."""
        rows = [self.rows[index] for index in self.order.next_batch()]
        num_tokens = sum(map(self._task.num_tokens, rows))
        rows = self._rank_rows(rows)
        batch = self._collate(rows)
        metrics = self.engine.train_minibatch(batch, self._task.objective)
        self.engine.advance_schedule()
        self.step_number += 1
        engine_metrics = {
            name: metrics.pop(name) for name in ("grad_norm", "lr", "skipped_updates")
        }
        return {
            **metrics,
            **{f"train/{name}": value for name, value in engine_metrics.items()},
            "train/global_tokens": float(num_tokens),
        }

    def validate(
        self, rows: EncodedRows, rows_per_batch: int, on_batch: Callable[[int], None] | None = None
    ) -> dict[str, float]:
        """Returns the task's validation metrics over all rows and ranks.

        After each batch, `on_batch` receives its number of rows.
        """
        mesh = self.engine.mesh
        rank, num_ranks = mesh.data_parallel_rank, mesh.data_parallel_size
        totals: dict[str, list[float]] = {}
        for start in range(0, len(rows), rows_per_batch):
            indices = range(start, min(start + rows_per_batch, len(rows)))
            # All ranks must join each collective, so a rank without rows computes a row that is not counted.
            rank_indices = list(indices[rank::num_ranks])
            rank_rows = [rows[i] for i in rank_indices or [start]]
            batch = self._collate(rank_rows, is_counted=bool(rank_indices))
            outputs = self.engine.infer(batch, **self._task.objective.options)
            is_counted = bool(rank_indices and mesh.is_collector)
            for name, sum_and_count in self._task.validation_sums(outputs, batch).items():
                total = totals.setdefault(name, [0.0, 0.0])
                for i, value in enumerate(sum_and_count):
                    total[i] += value * is_counted
            if on_batch is not None:
                on_batch(len(indices))
        sums = sum_over_ranks(*(total for total, _ in totals.values()))
        counts = sum_over_ranks(*(count for _, count in totals.values()))
        return {
            name: total / count
            for name, total, count in zip(totals, sums, counts, strict=True)
            if count
        }

    def _collate(self, rows: list[EncodedRow], *, is_counted: bool = True) -> DataProto:
        """Returns the batch of this rank's rows; every rank must call this."""
        batch = self._task.collate(rows, self._pad_token_id)
        columns = self._task.statistics(
            rows, self.engine, self._pad_token_id, is_counted=is_counted
        )
        for name, values in columns.items():
            batch.batch[name] = values
        return batch

    def _rank_rows(self, rows: list[EncodedRow]) -> list[EncodedRow]:
        """Returns the rows of a batch that this rank trains on."""
        mesh = self.engine.mesh
        rank, num_ranks = mesh.data_parallel_rank, mesh.data_parallel_size
        if num_ranks == 1:
            return rows
        if not self._balance_tokens:
            return rows[rank::num_ranks]
        lengths = [self._task.num_tokens(row) for row in rows]
        partitions = get_seqlen_balanced_partitions(lengths, num_ranks, equal_size=True)
        return [rows[i] for i in partitions[rank]]
