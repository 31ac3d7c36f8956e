"""Deadlines of phases follow from how long they took; a wait for ranks tells how far it is."""

from __future__ import annotations

import threading

import pytest

from hone.controller.worker_group import PhaseDeadlines, on_wait_progress, report_progress


def test_a_listener_hears_the_waits_inside_and_no_others() -> None:
    heard: list[tuple[int, int]] = []
    report_progress(1, 2)
    with on_wait_progress(lambda done, ranks: heard.append((done, ranks))):
        report_progress(1, 2)
        other = threading.Thread(target=report_progress, args=(7, 7))
        other.start()
        other.join()
        report_progress(2, 2)
    report_progress(9, 9)
    assert heard == [(1, 2), (2, 2)]


def test_the_floor_holds_until_the_phase_has_taken_longer() -> None:
    deadlines = PhaseDeadlines(floor_s=100.0, factor=10.0)
    assert deadlines.limit_s("generate") == 100.0
    deadlines.record("generate", 4.0)
    assert deadlines.limit_s("generate") == 100.0
    deadlines.record("generate", 30.0)
    deadlines.record("generate", 20.0)
    assert deadlines.limit_s("generate") == 300.0
    assert deadlines.limit_s("update") == 100.0


def test_only_completed_runs_are_recorded() -> None:
    deadlines = PhaseDeadlines(floor_s=0.0, factor=10.0)
    with pytest.raises(KeyError), deadlines.timed("generate"):
        raise KeyError
    assert deadlines.longest_run_s == {}
    with deadlines.timed("generate") as limit_s:
        assert limit_s == 0.0
    assert set(deadlines.longest_run_s) == {"generate"}


def test_the_advice_names_the_key_that_set_the_limit() -> None:
    deadlines = PhaseDeadlines(floor_s=100.0, factor=10.0)
    assert "trainer.phase_deadline_floor_s" in deadlines.advice("generate")
    deadlines.record("generate", 31.0)
    assert deadlines.advice("generate") == (
        "raise trainer.phase_deadline_factor (the limit is 10 times the longest run so far, 31 s) "
        "if the work is that long"
    )
