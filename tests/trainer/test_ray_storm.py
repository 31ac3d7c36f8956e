"""Two ranks on Ray, killed in several ways and started again, are the run that was not killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.storm_ray import run_storm


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_on_two_ranks_has_the_metrics_of_one_that_was_not(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    kinds = ["worker SIGKILL", "loop SIGKILL", "loop SIGTERM"]
    result = run_storm(tmp_path, kinds, steps=6)
    assert result["problems"] == []
    assert result["kills"] == len(kinds)
    assert result["metrics_lines_equal"] == 6 * result["runs_to_the_end"]
