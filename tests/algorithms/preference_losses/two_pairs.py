"""Two pairs with the log-ratios +2 and −1, and 0 and +1."""

from __future__ import annotations

from typing import Any

import torch

from hone.algorithms.preference_losses import LossFunction
from hone.config.preference import PreferenceLossConfig

PAIRS = {
    "chosen_logp": (-4.0, -3.0),
    "rejected_logp": (-6.0, -5.0),
    "ref_chosen_logp": (-6.0, -3.0),
    "ref_rejected_logp": (-5.0, -6.0),
    "chosen_length": (4.0, 1.0),
    "rejected_length": (2.0, 5.0),
    "margin": (0.0, 0.0),
}
BETA = 0.5


def call(name: str, values: dict[str, Any], **config: Any) -> tuple[list[float], dict[str, Any]]:
    """Returns the losses and the metrics of a loss in float64."""
    tensors = {key: torch.tensor(value, dtype=torch.float64) for key, value in values.items()}
    settings = PreferenceLossConfig(**{"beta": BETA, **config})
    losses, metrics = LossFunction(name)(**tensors, config=settings)
    assert losses.dtype == torch.float64
    return losses.tolist(), {key: value.tolist() for key, value in metrics.items()}


def losses_of(name: str, changes: dict[str, Any] | None = None, **config: Any) -> list[float]:
    return call(name, PAIRS | (changes or {}), **config)[0]
