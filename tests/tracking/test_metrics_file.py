from __future__ import annotations

import json
import math
import os
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.tracking import MetricsFile, TrackerError, read_metrics, series
from hone.tracking.metrics_file import decode_line, encode_line


def make(tmp_path: Path, *steps: int) -> MetricsFile:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in steps:
        file.append({"reward/mean": step / 10, "a": step}, step)
    return file


def test_a_line_is_strict_json_with_sorted_keys_and_the_step(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    file.append({"b": 0.1, "a": 2}, 7)
    assert file.path.read_text() == '{"a": 2, "b": 0.1, "step": 7}\n'


def test_values_that_are_not_finite_become_null_with_a_note_and_come_back(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append({"x": math.nan, "y": math.inf, "z": -math.inf, "ok": 1.5}, 1)
    raw = json.loads(file.path.read_text(), parse_constant=lambda c: pytest.fail(f"not JSON: {c}"))
    assert raw["x"] is None
    assert raw["_nonfinite"] == {"x": "nan", "y": "inf", "z": "-inf"}
    (row,) = file.rows()
    assert math.isnan(row["x"])
    assert (row["y"], row["z"], row["ok"]) == (math.inf, -math.inf, 1.5)
    assert "_nonfinite" not in row


@given(
    st.dictionaries(
        st.text(min_size=1).filter(lambda k: k not in ("step", "_nonfinite")),
        st.floats() | st.integers(-(2**60), 2**60),
    ),
    st.integers(0, 10**9),
)
def test_any_numbers_survive_the_round_trip_exactly(metrics: dict[str, float], step: int) -> None:
    line = encode_line(metrics, step)
    assert "\n" not in line
    row = decode_line(line)
    assert row is not None
    assert row.pop("step") == step
    assert row.keys() == metrics.keys()
    assert all(repr(row[key]) == repr(metrics[key]) for key in metrics)


def test_an_integer_that_no_float_holds_does_not_end_the_run(tmp_path: Path) -> None:
    from hone.tracking import Tracking

    metrics = {"huge": 10**400, "low": -(10**5000), "exact": 2**70}
    with Tracking("p", "e", "console", {}, tmp_path, prints_every_metric=True) as tracking:
        tracking.log(metrics, 1)
    row = {"huge": math.inf, "low": -math.inf, "exact": 2**70, "step": 1}
    assert read_metrics(tmp_path) == [row]


def test_scalars_of_numpy_and_torch_are_numbers(tmp_path: Path) -> None:
    import torch

    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append(
        {
            "a": np.float32(0.5),
            "b": np.int64(3),
            "c": torch.tensor(2.0),
            "d": np.bool_(True),
            "e": np.array([4.0]),
            "f": np.float64(0.25),
        },
        1,
    )
    assert next(file.rows()) == {"a": 0.5, "b": 3, "c": 2.0, "d": 1, "e": 4.0, "f": 0.25, "step": 1}


@pytest.mark.parametrize("value", [[1.0], "0.5", None, np.zeros(3), {"a": 1}, 1j])
def test_a_value_that_is_not_a_number_is_refused_by_name(tmp_path: Path, value: object) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(TrackerError, match=r"'actor/x' is .* not a number"):
        file.append({"actor/x": value}, 1)
    assert not file.path.exists()


def test_a_step_in_the_metrics_must_equal_the_logged_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step=3 but are logged at step=4"):
        MetricsFile(tmp_path / "metrics.jsonl").append({"step": 3}, 4)


def test_opening_a_file_again_appends(tmp_path: Path) -> None:
    make(tmp_path, 1, 2)
    make(tmp_path, 3)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]


def test_truncate_after_removes_later_steps_and_returns_how_many(tmp_path: Path) -> None:
    file = make(tmp_path, 0, 1, 2, 3, 4)
    before = file.path.read_bytes().splitlines(keepends=True)
    assert file.truncate_after(2) == 2
    assert file.path.read_bytes() == b"".join(before[:3])
    file.append({"a": 3}, 3)
    assert [row["step"] for row in file.rows()] == [0, 1, 2, 3]


def test_truncate_after_the_last_step_does_not_write_the_file(tmp_path: Path) -> None:
    file = make(tmp_path, 1, 2)
    inode = os.stat(file.path).st_ino
    assert file.truncate_after(2) == 0
    assert os.stat(file.path).st_ino == inode


def test_truncate_after_without_a_file_does_nothing(tmp_path: Path) -> None:
    assert MetricsFile(tmp_path / "metrics.jsonl").truncate_after(3) == 0
    assert list(tmp_path.iterdir()) == []


def test_truncate_after_removes_a_line_that_is_incomplete_at_any_position(tmp_path: Path) -> None:
    whole = make(tmp_path, 1, 2, 3).path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for length in range(len(whole) + 1):
        file = MetricsFile(tmp_path / "incomplete.jsonl")
        file.path.write_bytes(whole[:length])
        file.truncate_after(2)
        # A line that lacks only its line break is complete.
        expected = [line for line in lines[:2] if whole[:length].find(line.rstrip()) >= 0]
        assert file.path.read_bytes() == b"".join(expected)


def test_a_line_after_an_incomplete_one_is_read(tmp_path: Path) -> None:
    file = make(tmp_path, 1)
    with open(file.path, "ab") as raw:
        raw.write(b'{"a": 2, "rew')
    file.append({"a": 3}, 3)
    assert [row["step"] for row in file.rows()] == [1, 3]


def test_a_failed_truncate_after_keeps_every_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make(tmp_path, 1, 2, 3)
    before = file.path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda a, b: (_ for _ in ()).throw(OSError("no rename")))
    with pytest.raises(OSError, match="no rename"):
        file.truncate_after(1)
    assert file.path.read_bytes() == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_names_the_file_and_the_step(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"cannot append step 5 .*metrics\.jsonl"):
        MetricsFile(tmp_path / "metrics.jsonl").append({"a": 1}, 5)


def test_series_is_ordered_by_step_and_takes_the_last_of_a_step() -> None:
    rows = [{"step": 2, "a": 1.0}, {"step": 1, "a": 5}, {"step": 2, "a": 3.0}, {"step": 3, "b": 1}]
    assert series(rows, "a") == ([1, 2], [5.0, 3.0])


@pytest.mark.parametrize("note", [{"a": "oops"}, {"a": None}, ["a"], "a"])
def test_an_invalid_nonfinite_entry_leaves_the_value_null(note: object) -> None:
    line = json.dumps({"step": 1, "a": None, "b": 2.0, "_nonfinite": note})
    assert decode_line(line) == {"step": 1, "a": None, "b": 2.0}


def test_missing_metrics_are_an_error_with_advice(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="name a run folder"):
        read_metrics(tmp_path)


def test_a_line_that_is_written_in_part_is_an_error(tmp_path: Path) -> None:
    file = make(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    file.path.write_bytes(file.path.read_bytes() + b"\n" * (1 << 20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.path.stat().st_size + 5, limits[1]))
    try:
        with pytest.raises(OSError, match="cannot append step 2"):
            file.append({"loss": 1.0}, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
