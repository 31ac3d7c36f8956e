"""A DataProto in a file, written whole or not at all.

The file is a pickle of the state wire.py gives: for one's own batches, never for files of others.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def save(data: object, filepath: str | os.PathLike[str]) -> None:
    """Write to a file; a reader never sees half of it."""
    target = Path(filepath)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        pickle.dump(data, file, protocol=5)
    partial.replace(target)


def load(filepath: str | os.PathLike[str], kind: type[T]) -> T:
    """Read what `save` wrote. Only for files you trust: it is a pickle."""
    with Path(filepath).open("rb") as file:
        data = pickle.load(file)
    if not isinstance(data, kind):
        raise ValueError(f"{filepath} holds a {type(data).__name__}, not a {kind.__name__}")
    return data
