"""Rule-based scores, and the managers that turn scores into token rewards.

Names are imported on first use, so that a scoring process starts without torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "AbstractRewardManager": "hone.rewards.managers.rule",
    "RewardError": "hone.rewards.failures",
    "SetupError": "hone.rewards.failures",
    "UnknownSourceError": "hone.rewards.scores.table",
    "check_sources": "hone.rewards.scores.table",
    "compute_reward": "hone.rewards.loading",
    "default_compute_score": "hone.rewards.scores.table",
    "get_custom_reward_fn": "hone.rewards.loading",
    "get_reward_manager_cls": "hone.rewards.managers.registry",
    "load_extern_object": "hone.plugins",
    "load_reward_manager": "hone.rewards.loading",
    "register": "hone.rewards.managers.registry",
    "register_score": "hone.rewards.scores.table",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
