"""Learning-rate schedules as pure functions of the update number."""

from __future__ import annotations

import math

from hone.config.engine import OptimConfig


def warmup_updates(config: OptimConfig, total: int) -> int:
    if config.lr_warmup_steps > 0:
        return config.lr_warmup_steps
    return int(config.lr_warmup_steps_ratio * max(total, 0))


def lr_factor(update: int, total: int, config: OptimConfig) -> float:
    """Share of the peak learning rate at an update (0 is the first)."""
    warmup = warmup_updates(config, total)
    if update < warmup:
        return (update + 1) / (warmup + 1)
    if config.lr_scheduler_type == "constant" or total <= 0:
        return 1.0
    floor = config.min_lr_ratio
    if config.lr_scheduler_type == "cosine":
        progress = min(1.0, (update - warmup) / max(1, total - warmup))
        wave = 0.5 * (1.0 + math.cos(2.0 * math.pi * config.num_cycles * progress))
        return floor + (1.0 - floor) * wave
    decay = max(1, int(config.lr_decay_steps_ratio * total))
    progress = min(1.0, max(0, update - (total - decay)) / decay)
    return 1.0 - (1.0 - floor) * progress
