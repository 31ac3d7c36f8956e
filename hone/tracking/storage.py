"""Why a write failed, in words: a full disk, a quota, a read-only or failing file system.

Libraries wrap the system's error in their own; the cause is looked for in the whole chain.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is larger than the file system or `ulimit -f` allows",
    errno.EIO: "the disk failed (input/output error)",
    errno.EROFS: "the file system is read-only",
    errno.ESTALE: "the network file system lost the file (stale file handle)",
}
_REMEDIES = {
    errno.ENOSPC: "free space",
    errno.EDQUOT: "free space or raise the quota",
    errno.EFBIG: "raise the limit",
    errno.EIO: "check the disk",
    errno.EROFS: "mount it writable or name another folder",
    errno.ESTALE: "check the mount",
}
_TEXTS = {
    "No space left on device": errno.ENOSPC,
    "Disk quota exceeded": errno.EDQUOT,
    "File too large": errno.EFBIG,
    "Input/output error": errno.EIO,
    "Read-only file system": errno.EROFS,
}


def storage_failure(error: BaseException | None) -> int | None:
    """The number of the system's error behind a failed write; None where storage is not the cause."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in _REASONS:
            return error.errno
        failures = getattr(error, "failures", None)  # torch.distributed.checkpoint: one per rank
        for failure in failures.values() if isinstance(failures, dict) else ():
            cause = failure[0] if isinstance(failure, tuple) else failure
            if isinstance(cause, BaseException) and (number := storage_failure(cause)) is not None:
                return number
        text = str(error)
        for words, number in _TEXTS.items():
            if words in text:
                return number
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Give a failed write the name of the file, where the library that wrote it left it out."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(file)
        raise


def reason(number: int) -> str:
    """What is wrong, as the beginning of a sentence."""
    return _REASONS[number]


def remedy(number: int) -> str:
    """What to do about it."""
    return _REMEDIES[number]


def storage_sentence(error: BaseException) -> str | None:
    """One sentence about a failed write, where storage is the cause."""
    number = storage_failure(error)
    if number is None:
        return None
    file = getattr(error, "filename", None)
    where = f": {file} could not be written" if file else ": a file could not be written"
    return (
        f"{reason(number)}{where}. What was saved before is untouched; {remedy(number)} and start "
        "the same command again"
    )
