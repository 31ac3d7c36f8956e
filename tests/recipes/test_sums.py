"""The sums: how far held-out and trained ones overlap is what the README says; files appear whole."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "sums"


def module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"sums_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_ordered_sums_are_disjoint_and_the_readme_says_how_many_are_reordered() -> None:
    prepare = module("prepare")
    held_out, train = prepare.splits()["test"], prepare.splits()["train"]
    assert (len(held_out), len(train)) == (200, 900)
    assert not set(held_out) & set(train)
    count = prepare.reordered(held_out, train)
    text = " ".join((FOLDER / "README.md").read_text(encoding="utf-8").split())
    assert f"{count} of the 200 have the same digits in another order" in text
    for kept, other in re.findall(r"`(\d) \+ (\d)` is held out, `\2 \+ \1` trained on", text):
        assert (int(kept), int(other)) in held_out
        assert (int(other), int(kept)) in train


def test_a_reordered_sum_is_counted_and_an_equal_sum_of_other_digits_is_not() -> None:
    reordered = module("prepare").reordered
    assert reordered([(1, 2), (3, 4, 5), (7, 7)], [(2, 1), (5, 3, 4), (6, 8), (1, 2, 0)]) == 2


def test_the_files_are_written_and_the_overlap_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["prepare.py", str(tmp_path / "sums")])
    module("prepare").main()
    assert "189 of the 200 held-out sums are in train in another order" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "sums").iterdir()) == [
        "test.parquet",
        "train.parquet",
    ]
    compute_score = module("reward").compute_score
    for row in pq.read_table(tmp_path / "sums" / "test.parquet").to_pylist():
        truth, question = row["reward_model"]["ground_truth"], row["prompt"][0]["content"]
        digits = [int(d) for d in re.findall(r"\d", question)]
        assert compute_score("sums", f"{question} It is {sum(digits)}.", truth) == 1.0
        assert compute_score("sums", f"{sum(digits)} or {sum(digits) + 1}", truth) == 0.0


def test_a_stop_while_a_file_is_written_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = module("prepare")

    def torn(table: object, where: Path) -> None:
        Path(where).write_bytes(b"PAR1")
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare.pq, "write_table", torn)
    monkeypatch.setattr("sys.argv", ["prepare.py", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        prepare.main()
    assert list(tmp_path.iterdir()) == []
