"""User ids of a warden that root starts: the warden runs as uid 65534, and as root only in `as_root()`.

Programs that the warden executes never have root privileges, because exec resets the saved user id.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def lower_privileges(uid: int) -> None:
    """Sets the user and group to `uid` and keeps root as the saved id. Call it once, as root."""
    os.setgroups([])
    os.setresgid(uid, uid, 0)
    os.setresuid(uid, uid, 0)


@contextmanager
def as_root() -> Iterator[None]:
    """Makes root the effective user inside the block, if root is the saved user."""
    effective_uid, saved_uid = os.getresuid()[1:]
    if saved_uid != 0 or effective_uid == 0:
        yield
        return
    os.seteuid(0)
    try:
        yield
    finally:
        os.seteuid(effective_uid)


def drop_root() -> None:
    """Removes the saved root id for good; called in a child before untrusted code runs."""
    effective_uid, saved_uid = os.getresuid()[1:]
    if saved_uid == 0 and effective_uid != 0:
        gid = os.getegid()
        os.setresgid(gid, gid, gid)
        os.setresuid(effective_uid, effective_uid, effective_uid)
