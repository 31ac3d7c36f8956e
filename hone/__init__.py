"""hone: reinforcement learning for language models, from a laptop to a cluster.

Importing this package loads neither torch nor ray nor transformers: names resolve on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hone.protocol import DataProto, DataProtoFuture, DataProtoItem

__version__ = "0.1.0"

_LAZY = {
    "DataProto": "hone.protocol",
    "DataProtoItem": "hone.protocol",
    "DataProtoFuture": "hone.protocol",
}

__all__ = ["DataProto", "DataProtoFuture", "DataProtoItem", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'hone' has no attribute {name!r}")


from hone.compat import install as _install  # noqa: E402

_install()  # the family's module paths, resolved on first import
