"""Explains failed writes, even if a library wrapped the system error."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FAILURES = {
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
"""System error -> cause and remedy."""


def storage_failure(error: BaseException | None) -> int | None:
    """Returns the errno behind a failed write; None if storage is not the cause."""
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        if isinstance(error, OSError) and error.errno in _FAILURES:
            return error.errno
        failures = getattr(error, "failures", None)  # torch.distributed.checkpoint: one per rank
        for failure in failures.values() if isinstance(failures, dict) else ():
            cause = failure[0] if isinstance(failure, tuple) else failure
            if isinstance(cause, BaseException) and (number := storage_failure(cause)) is not None:
                return number
        for number in _FAILURES:
            if os.strerror(number) in str(error):
                return number
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


def reason(number: int) -> str:
    """Returns the cause, as the beginning of a sentence."""
    return _FAILURES[number][0]


def remedy(number: int) -> str:
    """Returns the remedy."""
    return _FAILURES[number][1]


def storage_error_message(error: BaseException) -> str | None:
    """Returns the message for a failed write; None if storage is not the cause."""
    number = storage_failure(error)
    if number is None:
        return None
    file = getattr(error, "filename", None) or "a file"
    return (
        f"{reason(number)}: {file} could not be written. Earlier files are unchanged; "
        f"{remedy(number)} and start the same command again"
    )
