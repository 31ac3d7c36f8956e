"""Learning-rate schedules as pure functions of the update number, by name or as the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable

from hone.config.engine import OptimConfig
from hone.plugins import Table

Schedule = Callable[[int, int, OptimConfig], float]
"""From an update (0 is the first, warm-up is over), the number of all and the settings to a share of `lr`."""

_HERE = "hone.engine.schedule"

SCHEDULES: Table[Schedule] = Table(
    "learning-rate schedule",
    {
        "constant": f"{_HERE}:constant",
        "cosine": f"{_HERE}:cosine",
        "linear": f"{_HERE}:linear",
        "wsd": f"{_HERE}:warmup_stable_decay",
    },
)


def warmup_updates(config: OptimConfig, total: int) -> int:
    if config.lr_warmup_steps > 0:
        return config.lr_warmup_steps
    return int(config.lr_warmup_steps_ratio * max(total, 0))


def lr_factor(update: int, total: int, config: OptimConfig) -> float:
    """Share of the peak learning rate at an update (0 is the first)."""
    warmup = warmup_updates(config, total)
    if update < warmup:
        return (update + 1) / (warmup + 1)
    if total <= 0:
        return 1.0
    return SCHEDULES.get(config.lr_scheduler_type)(update, total, config)


def constant(update: int, total: int, config: OptimConfig) -> float:
    """The peak to the end."""
    return 1.0


def cosine(update: int, total: int, config: OptimConfig) -> float:
    """From the peak to the floor along a cosine."""
    warmup, floor = warmup_updates(config, total), config.min_lr_ratio
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    wave = 0.5 * (1.0 + math.cos(2.0 * math.pi * config.num_cycles * progress))
    return floor + (1.0 - floor) * wave


def linear(update: int, total: int, config: OptimConfig) -> float:
    """From the peak to the floor along a straight line."""
    warmup = warmup_updates(config, total)
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    return 1.0 - (1.0 - config.min_lr_ratio) * progress


def warmup_stable_decay(update: int, total: int, config: OptimConfig) -> float:
    """The peak, then a straight line to the floor."""
    decay = max(1, int(config.lr_decay_steps_ratio * total))
    progress = min(1.0, max(0, update - (total - decay)) / decay)
    return 1.0 - (1.0 - config.min_lr_ratio) * progress
