"""hone: reinforcement learning for language models, from a laptop to a cluster.

Importing this package loads neither torch nor ray nor transformers: a name is imported on first use.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hone.api import LLM, Response, Trained, dpo, evaluate, sft, train
    from hone.config.dialect import Dialect
    from hone.protocol import DataProto, DataProtoFuture, DataProtoItem
    from hone.rewards.judge import Judge

__version__ = "0.1.0"

_MODULE_BY_NAME = {
    "Judge": "hone.rewards.judge",
    "LLM": "hone.api",
    "Response": "hone.api",
    "Trained": "hone.api",
    "dpo": "hone.api",
    "evaluate": "hone.api",
    "sft": "hone.api",
    "train": "hone.api",
    "DataProto": "hone.protocol",
    "DataProtoItem": "hone.protocol",
    "DataProtoFuture": "hone.protocol",
}

__all__ = [
    "LLM",
    "DataProto",
    "DataProtoFuture",
    "DataProtoItem",
    "Judge",
    "Response",
    "Trained",
    "__version__",
    "dpo",
    "evaluate",
    "sft",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_BY_NAME:
        return getattr(importlib.import_module(_MODULE_BY_NAME[name]), name)
    raise AttributeError(f"module 'hone' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def program_dialect() -> Dialect:
    """Returns the dialect that hone's programs give to `compose`: verl's, or without the room `hone.verl`
    one that knows hone's own keys only."""
    if importlib.util.find_spec("hone.verl") is None:
        from hone.config.dialect import OWN_KEYS

        return OWN_KEYS
    from hone.verl.dialect import VERL

    return VERL


def _initialize() -> None:
    """Installs the finder for verl's module paths, if hone/verl is there, and sets the logging level."""
    from hone.logging_level import set_logging_level

    if importlib.util.find_spec("hone.verl") is not None:
        from hone.verl.finder import install_finder

        install_finder()
    set_logging_level()


_initialize()
