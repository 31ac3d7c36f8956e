"""The SFT loop over shuffled, packed rows with a token-weighted loss.

Each rank runs this loop on its part of every batch. run.py has the run folder, checkpoints and trackers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hone.agents.collate import collate_outputs
from hone.agents.contract import AgentLoopOutput
from hone.engine.contract import TrainEngine
from hone.ops.balancing import get_seqlen_balanced_partitions
from hone.protocol import DataProto
from hone.trainer.ranks import sum_over_ranks
from hone.trainer.sft.order import RowOrder, refuse_uneven
from hone.workers.objectives import SupervisedObjective

EncodedRow = dict[str, list[int]]


class EncodedRows(Protocol):
    """Rows of `input_ids` and `loss_mask`, lists of equal length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> EncodedRow: ...


def collate(rows: Sequence[EncodedRow], pad_token_id: int) -> DataProto:
    """Build a batch; tokens before the first one with a loss are the prompt, the rest the response."""
    outputs = []
    for row in rows:
        ids, mask = row["input_ids"], row["loss_mask"]
        if 1 not in mask[1:]:
            raise ValueError("a row has no token to learn after its first; its loss_mask is all 0")
        start = mask.index(1, 1)
        outputs.append(AgentLoopOutput(ids[:start], ids[start:], mask[start:]))
    return collate_outputs(outputs, pad_token_id=pad_token_id)


class SFTTrainer:
    """Minimizes the mean negative log-likelihood of the tokens in the loss mask."""

    def __init__(
        self,
        engine: TrainEngine,
        rows: EncodedRows,
        *,
        pad_token_id: int,
        batch_rows: int,
        seed: int,
        shuffle: bool = True,
        balance_tokens: bool = True,
    ) -> None:
        refuse_uneven(batch_rows, engine.mesh.data_parallel_size)
        self.engine = engine
        self._rows = rows
        self._pad = pad_token_id
        self._balance = balance_tokens
        self.order = RowOrder(len(rows), batch_rows, seed=seed, shuffle=shuffle)
        self.step_number = 0

    def step(self) -> dict[str, float]:
        rows = [self._rows[number] for number in self.order.next_batch()]
        tokens = sum(len(row["input_ids"]) for row in rows)
        batch = collate(self._share(rows), self._pad)
        measured = self.engine.train_minibatch(batch, SupervisedObjective())
        self.engine.advance_schedule()
        self.step_number += 1
        return {
            "train/loss": measured["train/loss"],
            "train/grad_norm": measured["grad_norm"],
            "train/lr": measured["lr"],
            "train/skipped_updates": measured["skipped_updates"],
            "train/global_tokens": float(tokens),
        }

    def validation_loss(
        self, rows: EncodedRows, batch_rows: int, on_batch: Callable[[int], None] | None = None
    ) -> float:
        """Return the mean negative log-likelihood of the loss-mask tokens of all rows, over all ranks."""
        mesh = self.engine.mesh
        rank, ranks = mesh.data_parallel_rank, mesh.data_parallel_size
        total = tokens = 0.0
        for start in range(0, len(rows), batch_rows):
            numbers = range(start, min(start + batch_rows, len(rows)))
            # A rank without rows computes one that is not counted: every rank must join each collective.
            rank_numbers = list(numbers[rank::ranks])
            batch = collate([rows[i] for i in rank_numbers or [start]], self._pad)
            log_probs = self.engine.infer(batch, **SupervisedObjective().options)["log_probs"]
            if rank_numbers and mesh.collects:
                mask = batch.batch["response_mask"]
                total -= float((log_probs.double() * mask).sum())
                tokens += float(mask.sum())
            if on_batch is not None:
                on_batch(len(numbers))
        total, tokens = sum_over_ranks(total, tokens)
        return total / tokens

    def _share(self, rows: list[EncodedRow]) -> list[EncodedRow]:
        mesh = self.engine.mesh
        rank, ranks = mesh.data_parallel_rank, mesh.data_parallel_size
        if ranks == 1:
            return rows
        if not self._balance:
            return rows[rank::ranks]
        lengths = [len(row["input_ids"]) for row in rows]
        parts = get_seqlen_balanced_partitions(lengths, ranks, equal_size=True)
        return [rows[i] for i in parts[rank]]
