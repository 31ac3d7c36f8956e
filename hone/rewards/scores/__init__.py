"""Scores by rule: one file a data source, found through the one table in `table.py`.

Importing this package loads no scorer and no torch; `scores.gsm8k` loads when it is first used.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from hone.rewards.scores.table import (
    UnknownSourceError,
    check_sources,
    default_compute_score,
    known_sources,
    register_score,
)

_MODULES = {
    "arithmetic": "arithmetic",
    "asserts": "asserts",
    "countdown": "countdown",
    "geo3k": "geo3k",
    "gsm8k": "gsm8k",
    "math": "math_reward",
    "math_dapo": "math_dapo",
    "math_reward": "math_reward",
    "math_batch": "math_reward",
    "math_verify": "math_verify",
    "multiply": "arithmetic",
    "prime_code": "prime_code",
    "prime_math": "prime_math",
    "qa_em": "qa_em",
    "qa_em_format": "qa_em_format",
    "rlla": "rlla",
    "sandbox_fusion": "sandbox_fusion",
    "search_r1_like_qa_em": "qa_em",
}
"""verl's module names, each with the file that holds it here."""

__all__ = [
    "UnknownSourceError",
    "check_sources",
    "default_compute_score",
    "known_sources",
    "register_score",
]


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{_MODULES[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
