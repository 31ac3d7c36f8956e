"""A temporary folder that the next process deletes if its owner is killed."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import socket
import tempfile
from pathlib import Path
from typing import IO

SHARED_MEMORY = Path("/dev/shm")


class OwnedFolder:
    """A folder that its process holds locked, so that other processes see that the process still runs."""

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        """Creates the folder in `parent`, by default in shared memory; deletes folders of killed processes.

        `parent` may be on a file server. Folders of other machines are never deleted, because some file
        servers do not share locks between machines.
        """
        if parent is None:
            parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        prefix = f"{prefix}{socket.gethostname()}-"
        # `mkdtemp` appends 8 characters. `*` would also match the folders of a machine whose name begins
        # with the name of this machine.
        for folder in parent.glob(prefix + "?" * 8):
            with contextlib.suppress(OSError), _lock(folder):
                shutil.rmtree(folder, ignore_errors=True)
        # Until the folder is locked, the dot hides it from other processes.
        hidden = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
        self._lock_file: IO[bytes] | None = None
        with contextlib.suppress(OSError):  # a file server without locks
            self._lock_file = _lock(hidden)
        self.path = hidden.rename(parent / hidden.name[1:])

    def close(self) -> None:
        """Deletes the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_file is not None:
            self._lock_file.close()


def _lock(folder: Path) -> IO[bytes]:
    """Locks a folder until the returned file is closed; raises OSError if another process has locked it."""
    file = (folder / "lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file
