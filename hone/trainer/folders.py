"""Whether what a program writes can be written where it is told to, before anything is computed."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from hone.config.errors import ConfigError
from hone.tracking.lock import FolderLock, lock_folder


def require_folder(path: str, key: str) -> None:
    """Refuse a folder of results that is a file, lies in one, or cannot be written to."""
    folder = Path(path).expanduser().absolute()
    if folder.is_file():
        raise ConfigError(f"{key}={path} is a file; name a folder, new or of an earlier run")
    _require_writable(folder, f"{key}={path}")


def lock_run(folder: str) -> AbstractContextManager[FolderLock | None]:
    """The lock of a run folder; where there can be none, the checks that follow say why."""
    try:
        require_folder(folder, "trainer.default_local_dir")
    except ConfigError:
        return nullcontext()
    return lock_folder(folder)


def require_file(path: str, key: str) -> None:
    """Refuse a file of results that is a folder, or lies where nothing can be written."""
    file = Path(path).expanduser().absolute()
    if file.is_dir():
        raise ConfigError(f"{key}={path} is a folder; name a file in it")
    _require_writable(file.parent, f"{key}={path}")


def _require_writable(folder: Path, setting: str) -> None:
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir():
        raise ConfigError(f"{setting}: {there} is a file, so nothing can be written below it")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{setting}: {there} cannot be written to; name another place")
