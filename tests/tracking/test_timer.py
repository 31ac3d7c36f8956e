"""A timer adds up the seconds of a phase."""

from __future__ import annotations

import pytest

from hone.tracking.timer import simple_timer


def test_the_seconds_of_two_blocks_add_up_also_through_an_exception() -> None:
    timing: dict[str, float] = {}
    with simple_timer("gen", timing):
        pass
    first = timing["gen"]
    with pytest.raises(ValueError, match="x"), simple_timer("gen", timing):
        raise ValueError("x")
    assert timing["gen"] > first > 0
