"""Files that are either the old one or the new one: written under a temporary name, synced, renamed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hone.tracking.storage import naming

LEFTOVER_SUFFIX = ".tmp"


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path to write to; on success it becomes `path`, on failure it goes away."""
    target = Path(path)
    make_folder(target.parent)
    temporary = target.parent / f".{target.name}.{os.getpid()}{LEFTOVER_SUFFIX}"
    try:
        with naming(target):
            yield temporary
            sync(temporary)
            os.replace(temporary, target)
            sync(target.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def atomic_write_bytes(path: str | os.PathLike[str], content: bytes) -> Path:
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)
    return Path(path)


def atomic_write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write UTF-8 with line ends as they are; lone surrogates are escaped."""
    return atomic_write_bytes(path, text.encode("utf-8", "backslashreplace"))


def remove_leftovers(folder: str | os.PathLike[str]) -> list[Path]:
    """Delete the files killed writers left in `folder`, not below; call it when no writer runs."""
    leftovers = sorted(p for p in Path(folder).glob(f".*{LEFTOVER_SUFFIX}") if p.is_file())
    for file in leftovers:
        file.unlink(missing_ok=True)
    return leftovers


def make_folder(folder: Path) -> list[Path]:
    """Create a folder and its missing parents, on the disk; returns those created, deepest first."""
    created = []
    while not folder.is_dir():
        created.append(folder)
        folder = folder.parent
    for new in reversed(created):
        new.mkdir(exist_ok=True)
        sync(new.parent)
    return created


def rename_folder(source: Path, target: Path) -> None:
    """Rename a folder whose whole content is on the disk before, and whose new name is after."""
    grant_by_umask(source)
    for parent, _, files in os.walk(source, topdown=False):
        for file in (Path(parent, name) for name in files):
            if not file.is_symlink():
                sync(file)
        sync(Path(parent))
    os.rename(source, target)
    sync(target.parent)


def grant_by_umask(folder: Path) -> None:
    """Give every file below the permissions that the umask grants: safetensors writes 0600."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".mode") as probe:
        (Path(probe) / "file").touch()  # the umask itself cannot be read without setting it
        granted = (Path(probe) / "file").stat().st_mode & 0o666
    for file in folder.rglob("*"):
        mode = file.lstat().st_mode
        if file.is_file() and not file.is_symlink() and mode & granted != granted:
            with contextlib.suppress(PermissionError):  # another user's, or no permissions here
                file.chmod((mode | granted) & 0o7777)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        # Some network file systems cannot sync a folder; the rename itself still holds.
        if not path.is_dir():
            raise
    finally:
        os.close(handle)
