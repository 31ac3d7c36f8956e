from __future__ import annotations

import math
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.tracking.report_chart import (
    POINTS_DRAWN,
    Curve,
    Scale,
    chart,
    path_of,
    stacked_bar,
    tick_text,
    ticks,
)


def test_the_range_of_the_data_fills_the_frame() -> None:
    scale = Scale([Curve(0, [0, 100], [1.0, 3.0])])
    assert path_of(scale, [0, 100], [1.0, 3.0]) == "M52.0 178.0L370.0 18.0"


def test_a_value_that_is_not_finite_leaves_a_gap() -> None:
    scale = Scale([Curve(0, [0, 1, 2, 3], [0.0, math.nan, 1.0, 1.0])])
    path = path_of(scale, [0, 1, 2, 3], [0.0, math.nan, 1.0, 1.0])
    assert re.findall("[ML]", path) == ["M", "M", "L"]


@pytest.mark.parametrize(
    "values",
    [[5.0, 5.0], [0.0, 0.0], [math.nan, math.inf], [1e300, -1e300], [1e-300, 0.0], [5e-324, 0.0]],
)
def test_any_values_can_be_drawn(values: list[float]) -> None:
    html, _ = chart("k", [Curve(0, [1, 2], values)])
    assert "nan" not in html
    assert "inf" not in html


def test_a_single_point_is_marked() -> None:
    html, _ = chart("k", [Curve(2, [5], [1.0])])
    assert '<circle class="r2"' in html


def test_each_run_has_a_faint_and_a_smoothed_line_in_its_colour() -> None:
    steps = list(range(40))
    up, down = [float(s) for s in steps], [float(-s) for s in steps]
    html, data = chart("k", [Curve(0, steps, up), Curve(3, steps, down)])
    assert re.findall('class="(raw|line) (r.)"', html) == [
        ("raw", "r0"),
        ("line", "r0"),
        ("raw", "r3"),
        ("line", "r3"),
    ]
    raw, line = re.findall('r0" d="([^"]+)"', html)
    assert raw != line
    assert [c["run"] for c in data["curves"]] == [0, 3]
    assert data["curves"][0]["values"] == up


def test_a_long_curve_is_thinned() -> None:
    steps = list(range(20_000))
    _, data = chart("k", [Curve(0, steps, [math.sin(s) for s in steps])])
    assert len(data["curves"][0]["steps"]) <= POINTS_DRAWN


@pytest.mark.parametrize("count", [400, 2000, 20_000])
def test_the_smoothed_line_runs_at_the_height_of_the_data(count: int) -> None:
    chooser = random.Random(count)
    values = [float(chooser.random() < 0.05) for _ in range(count)]
    html, data = chart("k", [Curve(0, list(range(count)), values)])
    scale = Scale([Curve(0, [0, count - 1], [0.0, 1.0])])
    (path,) = re.findall('class="line r0" d="([^"]+)"', html)
    drawn = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", path)]
    assert len(drawn) == (count if count <= POINTS_DRAWN else POINTS_DRAWN // 2)
    mean = sum(values) / count
    assert sum(drawn) / len(drawn) == pytest.approx(scale.y(mean), abs=0.5)  # pixels
    (curve,) = data["curves"]
    counts = curve.get("counts", [1] * count)
    assert sum(counts) == count
    total = sum(v * c for v, c in zip(curve["values"], counts, strict=True))
    assert total == pytest.approx(sum(values))


def test_the_faint_line_of_a_long_curve_keeps_its_peaks() -> None:
    values = [0.0] * 20_000
    values[7_003] = 1.0
    html, _ = chart("k", [Curve(0, range(20_000), values)])
    scale = Scale([Curve(0, [0, 19_999], [0.0, 1.0])])
    raw, line = re.findall('r0" d="([^"]+)"', html)
    assert f"{scale.x(7_003):.1f} {scale.y(1.0):.1f}" in raw
    assert f" {scale.y(1.0):.1f}" not in line


def test_the_name_of_a_metric_is_escaped() -> None:
    html, _ = chart('"><script>', [Curve(0, [1], [1.0])])
    assert "<script>" not in html
    assert '""' not in html


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_few_round_and_inside(low: float, span: float) -> None:
    marks = ticks(low, low + span)
    assert 1 <= len(marks) <= 6
    assert all(low - 1e-6 * span <= m <= low + span * (1 + 1e-6) for m in marks)


def test_round_ticks() -> None:
    assert ticks(0, 100) == pytest.approx([0, 50, 100])
    assert ticks(0.1, 0.9) == pytest.approx([0.2, 0.4, 0.6, 0.8])


def test_parts_of_a_bar_are_in_proportion() -> None:
    html = stacked_bar([("gen", 3.0), ("a<b", 1.0)])
    assert re.findall('x="([^"]+)" width="([^"]+)"', html) == [
        ("0.00", "750.00"),
        ("750.00", "250.00"),
    ]
    assert "gen: 3 s (75.0%)" in html
    assert "a&lt;b" in html


def test_large_ticks_are_written_short() -> None:
    assert [tick_text(v) for v in (0.05, 250, 9000, 40_000, -1.5e6, 2e9)] == [
        "0.05",
        "250",
        "9000",
        "40k",
        "-1.5M",
        "2G",
    ]
