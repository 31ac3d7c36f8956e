"""The interface of a reward manager, which is created with a tokenizer and called with a batch.

A user's manager subclasses `AbstractRewardManager` and implements `__call__`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import Any

import torch

from hone.protocol import DataProto
from hone.rewards.scores.table import default_compute_score
from hone.tokenizer import Tokenizer
from hone.types import Fields, Function

RawRewardFn = Function
"""`(data_source, solution_str, ground_truth, extra_info) -> float | dict | tuple`."""


class AbstractRewardManager(ABC):
    """Scores a batch; rewards are zero except at each row's last policy token."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        num_examine: int,
        compute_score: RawRewardFn | None = None,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key
        self.failures: Counter[str] = Counter()

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | Fields:
        """Returns rewards [B, T]; with `return_dict`, `{"reward_tensor", "reward_extra_info"}`."""

    def pop_metrics(self) -> dict[str, float]:
        """Returns the failures since the last call, by reason, as metrics."""
        metrics = {f"reward/failures/{name}": float(n) for name, n in sorted(self.failures.items())}
        self.failures.clear()
        return metrics

    # Most managers hold no resources, so this is not abstract.
    def close(self) -> None:  # noqa: B027
        """Releases the manager's resources (processes). It may be called twice."""
