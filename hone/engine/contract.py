"""What a training engine promises its workers, narrow enough for another strategy to keep.

The engine calls the objective (so that pipeline stages could), divides by counts of the whole
mini-batch, and owns everything about devices and ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from hone.protocol import DataProto


@dataclass(frozen=True)
class Terms:
    """What an objective gives back for one micro-batch."""

    loss: Tensor
    """This micro-batch's share of the mini-batch loss; the shares sum to it."""
    shares: Mapping[str, Tensor] = field(default_factory=dict)
    """Metrics that sum over micro-batches and ranks (parts of the loss)."""
    means: Mapping[str, Tensor | float] = field(default_factory=dict)
    """Metrics that are means over this micro-batch's loss tokens."""
    maxima: Mapping[str, Tensor | float] = field(default_factory=dict)
    """Metrics whose largest value counts."""


class Objective(Protocol):
    """A loss over the model's outputs on one micro-batch."""

    options: Mapping[str, Any]
    """Arguments of the model's forward (temperature, with_entropy, …)."""

    def prepare(self, outputs: Mapping[str, Tensor], batch: DataProto) -> dict[str, Tensor]:
        """Columns that need the whole mini-batch, computed once without gradient."""

    needs_batch_statistics: bool

    def __call__(self, outputs: Mapping[str, Tensor], batch: DataProto) -> Terms: ...


class TrainEngine(Protocol):
    """One model under training (or only run forward) on this rank."""

    data_parallel_rank: int
    data_parallel_size: int

    def train_minibatch(self, batch: DataProto, objective: Objective) -> dict[str, float]:
        """One update. `batch` holds this rank's rows of the mini-batch."""

    def infer(self, batch: DataProto, **options: Any) -> dict[str, Tensor]:
        """Outputs [B, T] for every row, without gradient."""

    def named_hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by their Hugging Face names."""

    def save(self, folder: Path, contents: Collection[str]) -> None:
        """Write the named parts: model, optimizer, extra (how far the schedule is)."""

    def load(self, folder: Path, contents: Collection[str] | None = None) -> None:
        """Read the named parts; None reads all that was written."""
