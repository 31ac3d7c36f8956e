"""Deadlines of phases follow from how long they took."""

from __future__ import annotations

from hone.event_loop import PhaseDeadlines


def test_the_floor_holds_until_the_phase_has_taken_longer() -> None:
    deadlines = PhaseDeadlines(floor_s=100.0, factor=10.0)
    assert deadlines.limit_s("generate") == 100.0
    deadlines.record("generate", 4.0)
    assert deadlines.limit_s("generate") == 100.0
    deadlines.record("generate", 30.0)
    deadlines.record("generate", 20.0)
    assert deadlines.limit_s("generate") == 300.0
    assert deadlines.limit_s("update") == 100.0


def test_the_advice_names_the_key_that_set_the_limit() -> None:
    deadlines = PhaseDeadlines(floor_s=100.0, factor=10.0)
    assert "trainer.phase_deadline_floor_s" in deadlines.advice("generate")
    deadlines.record("generate", 31.0)
    assert deadlines.advice("generate") == (
        "raise trainer.phase_deadline_factor (the limit is 10 times the longest run so far, 31 s) "
        "if the work is that long"
    )
