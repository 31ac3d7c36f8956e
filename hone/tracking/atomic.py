"""Atomic file writes (write to a temporary name, sync, rename), and messages about failed writes."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

TEMPORARY_SUFFIX = ".tmp"
STORAGE_ERRORS = {
    errno.ENOSPC: ("the disk is full", "free space"),
    errno.EDQUOT: ("the disk quota is used up", "free space or raise the quota"),
    errno.EFBIG: (
        "the file is larger than the file system or `ulimit -f` allows",
        "raise the limit",
    ),
    errno.EIO: ("the disk failed (input/output error)", "check the disk"),
    errno.EROFS: ("the file system is read-only", "mount it writable or name another folder"),
    errno.ESTALE: ("the network file system lost the file (stale file handle)", "check the mount"),
}
"""The cause and the remedy of a failed write, by errno."""


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path that replaces `path` on success and is removed on failure."""
    target = Path(path)
    make_folder(target.parent)
    temporary = target.parent / f".{target.name}.{os.getpid()}{TEMPORARY_SUFFIX}"
    try:
        with add_file_name_to_errors(target):
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
    """Writes UTF-8 with unchanged line ends; lone surrogates are escaped."""
    return atomic_write_bytes(path, text.encode("utf-8", "backslashreplace"))


def remove_leftovers(folder: str | os.PathLike[str]) -> list[Path]:
    """Deletes temporary files of killed processes; no other process may be writing to the folder."""
    leftovers = sorted(filter(Path.is_file, Path(folder).glob(f".*{TEMPORARY_SUFFIX}")))
    for file in leftovers:
        file.unlink(missing_ok=True)
    return leftovers


def make_folder(folder: Path) -> list[Path]:
    """Creates and syncs a folder and its missing parents; returns the new folders, the deepest first."""
    missing_folders = []
    while not folder.is_dir():
        missing_folders.append(folder)
        folder = folder.parent
    for path in reversed(missing_folders):
        path.mkdir(exist_ok=True)
        sync(path.parent)
    return missing_folders


def rename_folder(source: Path, target: Path) -> None:
    """Syncs the content of a folder, renames the folder, and syncs the new name."""
    apply_umask(source)
    for parent, _, files in os.walk(source, topdown=False):
        for file in (Path(parent, name) for name in files):
            if not file.is_symlink():
                sync(file)
        sync(Path(parent))
    os.rename(source, target)
    sync(target.parent)


def apply_umask(folder: Path) -> None:
    """Gives every file in the folder the permissions of a new file, because safetensors writes 0600."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".mode") as probe_folder:
        probe_file = Path(probe_folder) / "file"
        probe_file.touch()  # the umask itself cannot be read without setting it
        umask_mode = probe_file.stat().st_mode & 0o666
    for file in folder.rglob("*"):
        mode = file.lstat().st_mode
        if file.is_file() and not file.is_symlink() and mode & umask_mode != umask_mode:
            with contextlib.suppress(PermissionError):  # for example, another user's file
                file.chmod((mode | umask_mode) & 0o7777)


def sync(path: Path) -> None:
    """Syncs a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        # Some network file systems cannot sync a folder; the rename is valid nevertheless.
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def storage_errno(error: BaseException | None) -> int | None:
    """Returns the errno behind a failed write; None if storage is not the cause."""
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        if isinstance(error, OSError) and error.errno in STORAGE_ERRORS:
            return error.errno
        failures = getattr(error, "failures", None)  # torch.distributed.checkpoint: one per rank
        for failure in failures.values() if isinstance(failures, dict) else ():
            cause = failure[0] if isinstance(failure, tuple) else failure
            error_number = storage_errno(cause) if isinstance(cause, BaseException) else None
            if error_number is not None:
                return error_number
        for error_number in STORAGE_ERRORS:
            if os.strerror(error_number) in str(error):
                return error_number
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def add_file_name_to_errors(file: Path) -> Iterator[None]:
    """Adds the file name to the error of a failed write if the library omitted it."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(file)
        raise


def storage_error_message(error: BaseException) -> str | None:
    """Returns the message for a failed write; None if storage is not the cause."""
    error_number = storage_errno(error)
    if error_number is None:
        return None
    file = getattr(error, "filename", None) or "a file"
    cause, remedy = STORAGE_ERRORS[error_number]
    return (
        f"{cause}: {file} could not be written. Earlier files are unchanged; "
        f"{remedy} and start the same command again"
    )
