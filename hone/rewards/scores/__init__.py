"""Rule-based scores: a file per rule, loaded on first use; `table.py` selects the rule of a data source."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from hone.rewards.scores.table import (
    UnknownSourceError,
    check_sources,
    default_compute_score,
    known_sources,
    register_score,
)

_ALIASES = {
    "math": "math_reward",
    "math_batch": "math_reward",
    "multiply": "arithmetic",
    "search_r1_like_qa_em": "qa_em",
}
"""verl's module names that differ from the file names here."""

__all__ = [
    "UnknownSourceError",
    "check_sources",
    "default_compute_score",
    "known_sources",
    "register_score",
]


def __getattr__(name: str) -> ModuleType:
    module = f"{__name__}.{_ALIASES.get(name, name)}"
    if name.startswith("__") or importlib.util.find_spec(module) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(module)
