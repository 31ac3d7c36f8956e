"""Files that are either the old one or the new one, never half of the new one.

The content goes to a temporary name beside the target, to the disk, and is then renamed. A kill
at any moment leaves at most a `*.tmp` file behind, which `remove_leftovers` clears.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

LEFTOVER_SUFFIX = ".tmp"


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path to write to; on success it becomes `path`, on failure it goes away."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.{os.getpid()}{LEFTOVER_SUFFIX}"
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, target)
        _sync(target.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def atomic_write_bytes(path: str | os.PathLike[str], content: bytes) -> Path:
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)
    return Path(path)


def atomic_write_text(path: str | os.PathLike[str], text: str) -> Path:
    """UTF-8, line ends as given. What UTF-8 cannot hold (lone surrogates) is written escaped."""
    return atomic_write_bytes(path, text.encode("utf-8", "backslashreplace"))


def remove_leftovers(folder: str | os.PathLike[str]) -> list[Path]:
    """Delete the files killed writers left in `folder`, not below; call it when no writer runs."""
    found = Path(folder).glob(f".*{LEFTOVER_SUFFIX}")
    leftovers = sorted(path for path in found if path.is_file())
    for file in leftovers:
        file.unlink(missing_ok=True)
    return leftovers


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        # Some network file systems cannot sync a folder; the rename itself still holds.
        if not path.is_dir():
            raise
    finally:
        os.close(handle)
