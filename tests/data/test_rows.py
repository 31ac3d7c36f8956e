from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hone.data.reading import read_rows
from hone.data.rows import BadRowPolicy, DataError, expand_files, write_parquet


def test_patterns_and_the_home_folder_are_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("b.jsonl", "a.jsonl"):
        (tmp_path / name).write_text("{}\n")
    assert expand_files("~/*.jsonl") == [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    with pytest.raises(DataError, match="no file matches"):
        expand_files("~/*.parquet")
    with pytest.raises(DataError, match="no data files were named"):
        expand_files([])


def test_structs_without_fields_are_written_as_null_at_any_depth(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"a": {}, "b": {"c": {}, "d": 1}, "e": [{}, {}], "f": {}},
        {"a": None, "b": {"c": None, "d": 2}, "e": [], "f": {"g": 1}},
    ]
    write_parquet(rows, tmp_path / "x.parquet")
    assert list(read_rows(tmp_path / "x.parquet", BadRowPolicy("raise")).scan()) == [
        {"a": None, "b": {"c": None, "d": 1}, "e": [None, None], "f": {"g": None}},
        {"a": None, "b": {"c": None, "d": 2}, "e": [], "f": {"g": 1}},
    ]


@pytest.mark.parametrize("values", [(1, "1"), (2**70, 1), ("\ud800", "x"), ([1], {"a": 1})])
def test_a_column_with_mixed_types_is_named(tmp_path: Path, values: tuple[Any, Any]) -> None:
    rows = [{"fine": 1, "truth": value} for value in values]
    with pytest.raises(DataError, match="column 'truth' cannot be written to parquet"):
        write_parquet(rows, tmp_path / "x.parquet")


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_parquet([{"a": 1}, {"a": 2}], path)
    before = path.read_bytes()
    with pytest.raises(DataError, match="column 'a'"):
        write_parquet([{"a": 1}, {"a": "text"}], path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["x.parquet"]


def test_an_unknown_policy_is_refused(write_jsonl: Callable[..., str]) -> None:
    policy: Any = "ignore"
    with pytest.raises(DataError, match="on_bad_row='ignore'"):
        BadRowPolicy(policy)
