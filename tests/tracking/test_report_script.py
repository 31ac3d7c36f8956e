"""The script of the report, run by node: scales, lines, ticks and smoothing."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import hone.tracking.report
from hone.tracking.curve import smooth
from hone.tracking.report import POINTS_DRAWN, _curves
from hone.tracking.report_data import RunData, collect_series

SCRIPT = Path(hone.tracking.report.__file__).with_name("report.js").read_text()

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


def run(expression: str) -> Any:
    """Returns the value of an expression in the script."""
    program = f"{SCRIPT}\nconsole.log(JSON.stringify({expression}));"
    process = subprocess.run(
        ["node", "-"], input=program, capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(process.stdout)


def curve_of(values: list[float], steps: list[int] | None = None) -> dict[str, Any]:
    """Returns the script's data for a run with these values."""
    steps = steps or list(range(len(values)))
    rows = [{"step": step, "k": value} for step, value in zip(steps, values, strict=True)]
    (curve,) = _curves("k", [RunData("r", collect_series(rows))])
    return dict(curve)


def test_the_range_of_the_data_fills_the_frame_and_a_gap_is_left_open() -> None:
    curve = json.dumps(curve_of([1.0, math.nan, 3.0, 3.0], [0, 50, 90, 100]))
    path = run(f"(c => pathOf(scaleOf([c]), c.steps, c.values))({curve})")
    assert path.startswith("M52.0 178.0M")
    assert path.endswith("L370.0 18.0")
    assert re.findall("[ML]", path) == ["M", "M", "L"]


def test_any_values_can_be_drawn() -> None:
    cases = [
        [5.0, 5.0],
        [0.0, 0.0],
        [math.nan, math.inf],
        [1e299, -1e299],
        [1e-300, 0],
        [5e-324, 0],
    ]
    curves = json.dumps([curve_of(values) for values in cases])
    drawn = run(
        f"{curves}.map(c => (s => [pathOf(s, c.steps, c.values), ticks(s.y0, s.y1)])(scaleOf([c])))"
    )
    assert not re.search("NaN|Infinity", json.dumps(drawn))
    assert all(1 <= len(tick_values) <= 6 for _, tick_values in drawn)


def test_ticks_are_few_round_and_inside() -> None:
    ranges = [(0, 100), (0.1, 0.9), (-3.0, 17.0), (1e-7, 3e-7), (0.0, 52_000.0), (2e6, 9e6)]
    tick_values = run(f"{json.dumps(ranges)}.map(([low, high]) => ticks(low, high))")
    assert tick_values[0] == pytest.approx([0, 50, 100])
    assert tick_values[1] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    for (low, high), ticks_inside in zip(ranges, tick_values, strict=True):
        assert 1 <= len(ticks_inside) <= 6
        assert all(low - 1e-9 <= tick <= high * (1 + 1e-9) for tick in ticks_inside)
    values = [0.05, 250, 9000, 40_000, -1.5e6, 2e9]
    texts = ["0.05", "250", "9000", "40k", "-1.5M", "2G"]
    assert run(f"{values}.map(tickText)") == texts


def test_smoothing_equals_that_of_the_learning_curve() -> None:
    smoothed = run("smooth([1, null, 3, 2], 0.9)")
    expected = smooth([1.0, math.nan, 3.0, 2.0], 0.9)
    assert smoothed[1] is None
    assert [smoothed[i] for i in (0, 2, 3)] == pytest.approx([expected[i] for i in (0, 2, 3)])
    weighted, repeated = run("[smooth([1, 5], 0.7, [3, 2]), smooth([1, 1, 1, 5, 5], 0.7)]")
    assert weighted == pytest.approx([repeated[2], repeated[4]])


@pytest.mark.parametrize("count", [400, 2000, 20_000])
def test_smoothing_preserves_the_mean(count: int) -> None:
    rng = random.Random(count)
    values = [float(rng.random() < 0.05) for _ in range(count)]
    curve = curve_of(values)
    assert len(curve["steps"]) == (count if count <= POINTS_DRAWN else POINTS_DRAWN // 2)
    means = run(
        f"(c => [0, 0.3, 0.6, 0.9].map(w => smooth(c.values, w, c.counts))"
        f".map(line => line.reduce((a, b) => a + b) / line.length))({json.dumps(curve)})"
    )
    assert means == pytest.approx([sum(values) / count] * 4, abs=0.005)


def test_the_raw_line_of_a_long_curve_keeps_its_peaks() -> None:
    values = [0.0] * 20_000
    values[7_003] = 1.0
    curve = curve_of(values)
    assert (7_003, 1.0) in zip(curve["raw"]["steps"], curve["raw"]["values"], strict=True)
    assert max(curve["values"]) < 1.0
    assert len(curve["raw"]["steps"]) <= POINTS_DRAWN
