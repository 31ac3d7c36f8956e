"""A warden that root starts works as uid 65534 and becomes root only inside `raised()`.

Programs that it executes have no root rights, because exec resets the saved user id.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def lower(uid: int) -> None:
    """Set the effective user and keep root as the saved id. Call once, as root."""
    os.setgroups([])
    os.setresgid(uid, uid, 0)
    os.setresuid(uid, uid, 0)


@contextmanager
def raised() -> Iterator[None]:
    """Become root inside the block, if root is the saved user id."""
    effective, saved = os.getresuid()[1:]
    if saved != 0 or effective == 0:
        yield
        return
    os.seteuid(0)
    try:
        yield
    finally:
        os.seteuid(effective)


def drop() -> None:
    """Give up the saved root id permanently; called in a child before untrusted code runs."""
    effective, saved = os.getresuid()[1:]
    if saved == 0 and effective != 0:
        group = os.getegid()
        os.setresgid(group, group, group)
        os.setresuid(effective, effective, effective)
