"""Kills every local process that carries a mark in its environment; uses the standard library only.

As a program (`python reaper.py MARK PARENT_PID`) it waits until its parent has ended, for whatever
reason, and then kills the marked processes. `start_reaper` starts it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

MARK_ENV = "HONE_PROCESS_MARKS"
"""Holds the marks of a process, separated by colons: that of its cluster, and that of its server."""
LOOK_EVERY_S = 0.5
END_DEADLINE_S = 10.0


def start_reaper(mark: str) -> subprocess.Popen[bytes]:
    """Starts the program that kills the marked processes when this one has ended."""
    # A new session: a signal to this process group must not kill the reaper.
    return subprocess.Popen(
        [sys.executable, "-S", "-E", __file__, mark, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def with_mark(mark: str) -> dict[str, str]:
    """Returns the variable that marks a child process, which keeps the marks of this one."""
    return {MARK_ENV: ":".join(filter(None, (os.environ.get(MARK_ENV), mark)))}


def marked(mark: str) -> list[int]:
    """Returns the pids of the other processes that carry this mark, and of those that they started.

    A process that sets its title, as Ray's agents do, may overwrite the mark.
    """
    entry = re.compile(rf"(^|\0){MARK_ENV}=([^\0]*:)?{re.escape(mark)}[:\0]".encode())
    parents: dict[int, int] = {}
    pids: set[int] = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state != b"Z":
                    parents[int(name)] = int(parent)
                with open(f"/proc/{name}/environ", "rb") as file:
                    if entry.search(file.read() + b"\0"):
                        pids.add(int(name))
    while started := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= started
    return sorted(pids)


def end_marked(mark: str) -> list[int]:
    """Kills all marked processes and their new children; returns the pids that remain."""
    end_time = time.monotonic() + END_DEADLINE_S
    while (pids := marked(mark)) and time.monotonic() < end_time:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    return pids


def main() -> None:
    mark, parent = sys.argv[1], int(sys.argv[2])
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY_S)
    end_marked(mark)


if __name__ == "__main__":
    main()
