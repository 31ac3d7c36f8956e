"""A call that exceeds its CPU time is interrupted; other threads are not."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from hone.data import chat_template
from hone.data.chat_template import CpuTimeExceeded, run_limited


def spin() -> None:
    while True:
        pass


def test_an_endless_loop_is_ended_in_any_thread() -> None:
    interrupted: list[bool] = []

    def run_endless_loop() -> None:
        with pytest.raises(CpuTimeExceeded):
            run_limited(spin, 0.05)
        interrupted.append(True)

    thread = threading.Thread(target=run_endless_loop)
    thread.start()
    run_endless_loop()
    thread.join(60)
    assert interrupted == [True, True]


def test_waiting_is_not_computing() -> None:
    assert run_limited(lambda: time.sleep(0.6) or "done", 0.1) == "done"  # type: ignore[func-returns-value]


def test_an_exception_of_the_call_is_raised() -> None:
    with pytest.raises(KeyError):
        run_limited(lambda: {}["x"], 1.0)


def test_no_interrupt_arrives_after_a_call() -> None:
    """The calls end at about their CPU time limit."""
    for _ in range(40):
        try:
            run_limited(lambda: sum(range(10**5)), 1e-9)
        except CpuTimeExceeded:
            continue
    total = sum(1 for _ in range(10**5))
    assert total == 10**5


def test_an_interrupt_before_the_end_of_the_watch_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop_watching, num_calls = chat_template._stop_watching, 0

    def stop_after_an_interrupt(thread: int, is_interrupt_raised: bool) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise chat_template._Interrupt
        stop_watching(thread, is_interrupt_raised)

    monkeypatch.setattr(chat_template, "_stop_watching", stop_after_an_interrupt)
    assert run_limited(lambda: "done", 1.0) == "done"
    assert threading.get_ident() not in chat_template._watcher._cpu_deadlines


def test_a_call_leaves_the_interpreter_as_it_was() -> None:
    """A cleared interrupt would make a profiled call hang."""
    code = (
        "import sys; from hone.data.chat_template import run_limited; f = lambda: 1;"
        "run_limited(f, 1); sys.setprofile(lambda *_: None); f()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
