from __future__ import annotations

import json
import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hone.tracking import series
from hone.tracking.report_data import collect_series, load_metrics

ROWS = st.lists(
    st.fixed_dictionaries(
        {"step": st.integers(0, 9)},
        optional={"a": st.floats(-1e9, 1e9) | st.integers(0, 99), "b": st.booleans()},
    )
)


@given(ROWS)
def test_arrays_equal_the_rows(rows: list[dict[str, float]]) -> None:
    metrics = collect_series(rows)
    assert list(metrics.series) == sorted({key for row in rows for key in row} - {"step"})
    for key in ("a", "b"):
        steps, values = metrics.get(key)
        assert (steps.tolist(), values.tolist()) == series(rows, key)
    steps = [int(row["step"]) for row in rows]
    assert metrics.step_range == ((min(steps), max(steps)) if steps else None)
    assert metrics.notes == []


def test_non_finite_values_stay_and_huge_values_become_infinite() -> None:
    values = [math.nan, math.inf, 1e300, 1.01e300, -1.7e308]
    metrics = collect_series([{"step": i, "a": v} for i, v in enumerate(values)])
    assert repr(metrics.get("a").values.tolist()) == "[nan, inf, 1e+300, inf, -inf]"
    assert metrics.get("a").finite_points().values.tolist() == [1e300]
    assert metrics.notes == ["a: not drawn where it is beyond ±1e+300 (2 lines)"]


def test_invalid_lines_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    good = json.dumps({"step": 1, "a": 1.0})
    file.write_text(f"{good}\n\nnonsense\n[1]\n{good[:-3]}")
    metrics = load_metrics(file)
    assert metrics.get("a").values.tolist() == [1.0]
    assert metrics.notes == [
        "metrics.jsonl: skipped lines that are not metrics (3 lines, the first being line 3)"
    ]
