"""The manager of a reward model outside of the run's workers: a served classifier, or a judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hone.event_loop import run_coroutine
from hone.protocol import DataProto
from hone.rewards.failures import Failed, Scored
from hone.rewards.managers.rule import RuleRewardManager
from hone.rewards.rows import ScorerInput
from hone.tokenizer import Tokenizer


class ModelScorer(Protocol):
    """A reward model that scores rows; `extra_info["prompt"]` is the row's prompt."""

    async def score_rows(self, rows: Sequence[ScorerInput]) -> list[Scored | Failed]: ...

    def pop_metrics(self) -> dict[str, float]: ...

    def connection_error(self) -> str | None:
        """Returns why the model's server cannot be reached, or None."""


class ModelRewardManager(RuleRewardManager):
    """Scores all rows of a batch concurrently with a `ModelScorer`."""

    def __init__(self, tokenizer: Tokenizer, *, scorer: ModelScorer, **kwargs: Any) -> None:
        super().__init__(tokenizer, 0, scorer.score_rows, **kwargs)
        self.scorer = scorer

    def read_rows(
        self, data: DataProto, ids: list[list[int]], is_policy: list[list[bool]]
    ) -> list[ScorerInput]:
        """Adds the prompt to each row."""
        rows = super().read_rows(data, ids, is_policy)
        for row, prompt in zip(rows, data.non_tensor_batch["raw_prompt"], strict=True):
            row.extra_info["prompt"] = prompt
        return rows

    def score_rows(self, rows: Sequence[ScorerInput]) -> list[Scored | Failed]:
        return run_coroutine(self.scorer.score_rows(rows))

    def pop_metrics(self) -> dict[str, float]:
        """Returns failures by reason (`reward/model_failures/…`) and the scorer's metrics."""
        items = super().pop_metrics().items()
        failures = {name.replace("reward/", "reward/model_", 1): value for name, value in items}
        return failures | self.scorer.pop_metrics()
