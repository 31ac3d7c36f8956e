"""A stopped process is told from a busy one, and silence is counted only while someone looks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from hone.controller.processes import (
    GONE,
    MAX_UPDATE_GAP_S,
    STOPPED,
    UnresponsiveTimer,
    process_state,
)


def test_a_process_is_stopped_goes_on_and_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    try:
        os.kill(child.pid, signal.SIGSTOP)
        _until_state(child.pid, STOPPED)
        os.kill(child.pid, signal.SIGCONT)
        _until_state(child.pid, "R")
    finally:
        child.kill()
        child.wait()
    assert process_state(child.pid) == GONE


def _until_state(pid: int, state: str) -> None:
    ends = time.monotonic() + 60
    while process_state(pid) != state:
        assert time.monotonic() < ends, process_state(pid)
        time.sleep(0.01)


def test_what_is_silent_for_the_whole_limit_is_named() -> None:
    timer = UnresponsiveTimer(3.0)
    assert [timer.update(["a"], now) for now in (10.0, 11.0, 12.0)] == [[], [], []]
    assert timer.update(["a", "b"], 13.0) == ["a"]


def test_one_answer_starts_the_count_again() -> None:
    timer = UnresponsiveTimer(2.0)
    timer.update(["a"], 0.0)
    timer.update([], 1.0)
    assert timer.update(["a"], 2.0) == []
    assert timer.update(["a"], 3.0) == []
    assert timer.update(["a"], 4.0) == ["a"]


@pytest.mark.parametrize("away_s", [100.0, 1e6])
def test_a_caller_that_was_busy_or_stopped_itself_has_seen_no_silence(away_s: float) -> None:
    timer = UnresponsiveTimer(20.0)
    timer.update(["a"], 0.0)
    assert timer.update(["a"], away_s) == []
    looks = [timer.update(["a"], away_s + k * MAX_UPDATE_GAP_S) for k in (1, 2, 3)]
    assert looks == [[], [], ["a"]]
