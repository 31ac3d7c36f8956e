"""Kills every process of this machine that has a given mark in its environment.

`start_reaper` runs this file as a program, `python reaper.py MARK PARENT_PID`. The program waits until
its parent has ended, then kills the marked processes. It imports the standard library only.
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
"""The marks of a process, separated by colons: one for each Ray cluster or SGLang server it belongs to."""
POLL_INTERVAL_S = 0.5
KILL_DEADLINE_S = 10.0


def start_reaper(mark: str) -> subprocess.Popen[bytes]:
    """Starts the program that kills the marked processes after this process has ended."""
    # A new session: a signal to this process group must not kill the reaper.
    return subprocess.Popen(
        [sys.executable, "-S", "-E", __file__, mark, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def marked_environment(mark: str) -> dict[str, str]:
    """Returns the environment variable of a child process: the marks of this process and `mark`."""
    return {MARK_ENV: ":".join(filter(None, (os.environ.get(MARK_ENV), mark)))}


def marked_pids(mark: str) -> list[int]:
    """Returns the pids of the other processes with this mark, and of their child processes.

    A process that sets its title, as Ray's agents do, may overwrite its mark.
    """
    mark_pattern = re.compile(rf"(^|\0){MARK_ENV}=([^\0]*:)?{re.escape(mark)}[:\0]".encode())
    parent_pids: dict[int, int] = {}
    pids: set[int] = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state != b"Z":
                    parent_pids[int(name)] = int(parent)
                with open(f"/proc/{name}/environ", "rb") as file:
                    if mark_pattern.search(file.read() + b"\0"):
                        pids.add(int(name))
    children = pids
    while children:
        children = {pid for pid, parent in parent_pids.items() if parent in pids} - pids
        pids |= children
    return sorted(pids)


def kill_marked_processes(mark: str) -> list[int]:
    """Kills all processes with this mark and their children; returns the pids that remain."""
    end_time = time.monotonic() + KILL_DEADLINE_S
    while (pids := marked_pids(mark)) and time.monotonic() < end_time:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    return pids


def main() -> None:
    mark, parent_pid = sys.argv[1], int(sys.argv[2])
    while os.getppid() == parent_pid:
        time.sleep(POLL_INTERVAL_S)
    kill_marked_processes(mark)


if __name__ == "__main__":
    main()
