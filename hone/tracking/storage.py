"""Explains failed writes, even if a library wrapped the OSError."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STORAGE_ERRORS = {
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
"""errno → cause and remedy."""


def storage_errno(error: BaseException | None) -> int | None:
    """Returns the errno behind a failed write; None if storage is not the cause."""
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        if isinstance(error, OSError) and error.errno in _STORAGE_ERRORS:
            return error.errno
        failures = getattr(error, "failures", None)  # torch.distributed.checkpoint: one per rank
        for failure in failures.values() if isinstance(failures, dict) else ():
            cause = failure[0] if isinstance(failure, tuple) else failure
            if (
                isinstance(cause, BaseException)
                and (error_number := storage_errno(cause)) is not None
            ):
                return error_number
        for error_number in _STORAGE_ERRORS:
            if os.strerror(error_number) in str(error):
                return error_number
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def add_file_name_to_errors(file: Path) -> Iterator[None]:
    """Adds the file name to the error of a failed write if the library omitted it."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(file)
        raise


def reason(error_number: int) -> str:
    """Returns the cause of an error of `storage_errno`, as a clause."""
    return _STORAGE_ERRORS[error_number][0]


def remedy(error_number: int) -> str:
    """Returns the remedy for an error of `storage_errno`, as an imperative."""
    return _STORAGE_ERRORS[error_number][1]


def storage_error_message(error: BaseException) -> str | None:
    """Returns the message for a failed write; None if storage is not the cause."""
    error_number = storage_errno(error)
    if error_number is None:
        return None
    file = getattr(error, "filename", None) or "a file"
    return (
        f"{reason(error_number)}: {file} could not be written. Earlier files are unchanged; "
        f"{remedy(error_number)} and start the same command again"
    )
