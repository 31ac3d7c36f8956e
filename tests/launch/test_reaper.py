"""What carries a mark is ended: stopped processes too, and after any end of the one that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hone.launch import reaper

SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
PARENT = """
import os, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
import reaper
reaper.start_reaper(sys.argv[2])
child = subprocess.Popen(
    [sys.executable, "-S", "-c", "import time; time.sleep(600)"],
    env={**os.environ, **reaper.marked_environment(sys.argv[2])}, start_new_session=True,
)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_only_marked_processes_are_ended_and_stopped_ones_too() -> None:
    mine, stopped, other = (
        subprocess.Popen(SLEEPER, env={**os.environ, reaper.MARK_ENV: mark})
        for mark in ("one", "one", "another")
    )
    try:
        os.kill(stopped.pid, signal.SIGSTOP)
        _until(lambda: len(reaper.marked_pids("one")) == 2)
        assert reaper.kill_marked_processes("one") == []
        assert (mine.wait(), stopped.wait()) == (-signal.SIGKILL, -signal.SIGKILL)
        assert other.poll() is None
    finally:
        for process in (mine, stopped, other):
            process.kill()
            process.wait()


def test_what_a_killed_process_left_is_ended() -> None:
    mark = f"left-{os.getpid()}"
    parent = subprocess.Popen(
        [sys.executable, "-S", "-c", PARENT, str(Path(reaper.__file__).parent), mark],
        stdout=subprocess.PIPE,
        env={**os.environ, reaper.MARK_ENV: "outer"},
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    _until(lambda: reaper.marked_pids(mark) == [child])
    assert {parent.pid, child} <= set(reaper.marked_pids("outer")), "the mark around it is lost"
    parent.kill()
    parent.communicate()
    _until(lambda: reaper.marked_pids(mark) == [])


def test_a_child_that_lost_the_mark_is_ended_with_its_parent() -> None:
    started = (
        "import subprocess, sys; "
        "print(subprocess.Popen(sys.argv[1:], env={}).pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-S", "-c", started, *SLEEPER],
        env={**os.environ, reaper.MARK_ENV: "parent"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert reaper.marked_pids("parent") == sorted([parent.pid, child])
        assert reaper.kill_marked_processes("parent") == []
    _until(lambda: _ended(child))


def _ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() == b""  # a zombie has none
    except OSError:
        return True


def _until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)
