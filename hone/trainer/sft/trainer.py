"""The supervised loop: shuffled rows, packed, token-weighted loss; small because the engine does the work."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from hone.agents.collate import collate_outputs
from hone.agents.contract import AgentLoopOutput
from hone.engine.engine import Engine
from hone.protocol import DataProto
from hone.workers.objectives import SupervisedObjective


class EncodedRows(Protocol):
    """Rows of `input_ids` and `loss_mask`, lists of one length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, list[int]]: ...


def collate(rows: Sequence[dict[str, list[int]]], pad_token_id: int) -> DataProto:
    """Everything before the first learnt token is the prompt; the rest is the response."""
    outputs = []
    for row in rows:
        ids, mask = row["input_ids"], row["loss_mask"]
        if 1 not in mask[1:]:
            raise ValueError("a row has no token to learn after its first; its loss_mask is all 0")
        start = mask.index(1, 1)
        outputs.append(AgentLoopOutput(ids[:start], ids[start:], mask[start:]))
    return collate_outputs(outputs, pad_token_id=pad_token_id)


class SFTTrainer:
    """Minimises the mean negative log-likelihood of the learnt tokens."""

    def __init__(
        self, engine: Engine, rows: EncodedRows, *, pad_token_id: int, batch_rows: int, seed: int
    ) -> None:
        self.engine = engine
        self._rows = rows
        self._pad = pad_token_id
        self._batch_rows = batch_rows
        self._batches = self._endless(seed)
        self.step_number = 0

    def fit(
        self, steps: int, on_step: Callable[[int, dict[str, float]], bool | None] | None = None
    ) -> None:
        """Take `steps` updates; `on_step` may end it early by returning True."""
        for _ in range(steps):
            measured = self.step()
            if on_step is not None and on_step(self.step_number, measured):
                return

    def step(self) -> dict[str, float]:
        batch = collate([self._rows[i] for i in next(self._batches)], self._pad)
        measured = self.engine.train_minibatch(batch, SupervisedObjective())
        assert self.engine.optimizer is not None
        self.engine.optimizer.advance_schedule()
        self.step_number += 1
        return {
            "train/loss": measured["train/loss"],
            "train/grad_norm": measured["grad_norm"],
            "train/lr": measured["lr"],
            "train/global_tokens": float(batch.batch["attention_mask"].sum()),
        }

    def _endless(self, seed: int) -> Iterator[list[int]]:
        chooser = random.Random(seed)
        while True:
            order = list(range(len(self._rows)))
            chooser.shuffle(order)
            for start in range(0, len(order) - self._batch_rows + 1, self._batch_rows):
                yield order[start : start + self._batch_rows]
