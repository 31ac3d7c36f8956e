"""The guard: a process that waits for the end of the warden, and kills the boxes that the warden leaves.

It outlives a trainer and a warden that are killed together: a bubblewrap process that has just started does
not die with its parent yet, or waits for its dead parent forever.
"""

from __future__ import annotations

import contextlib
import os
import signal


def main(session_id: int) -> None:
    """Waits until the warden, which holds the other end of standard input, has ended."""
    os.read(0, 1)
    kill_session(session_id)


def kill_session(session_id: int) -> None:
    """Kills all processes in the session of a dead warden.

    The kernel does not reuse a session's id while the session has a member.
    """
    has_members = True
    while has_members:
        has_members = False
        for name in os.listdir("/proc"):
            with contextlib.suppress(ProcessLookupError, PermissionError, ValueError):
                if os.getsid(int(name)) == session_id and os.path.exists(f"/proc/{name}/exe"):
                    os.kill(int(name), signal.SIGKILL)  # zombies have no exe
                    has_members = True
