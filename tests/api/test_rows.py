"""Rows in every form that users have them become rows of our files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hone.api.rows import as_rows, file_names, to_prompt_row, to_sft_rows, write_rows
from hone.data.rows import DataError


class LikeDatasets:
    """What a `datasets.Dataset` offers, as far as it is used."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def to_list(self) -> list[dict[str, Any]]:
        return self._rows


class LikePandas:
    """What a frame offers, as far as it is used."""

    columns = ("prompt", "answer")

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        assert orient == "records"
        return self._rows


ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        tuple(ROWS),
        iter(ROWS),
        [("1+1=", "2"), ("2+2=", "4")],
        LikeDatasets(ROWS),
        LikePandas(ROWS),
        pa.Table.from_pylist(ROWS),
    ],
    ids=["list", "tuple", "generator", "pairs", "datasets", "pandas", "arrow"],
)
def test_rows_are_read_from(data: Any) -> None:
    assert as_rows(data) == ROWS


def test_prompts_alone_are_rows() -> None:
    chat = [{"role": "user", "content": "hi"}]
    assert as_rows(["hi", chat]) == [{"prompt": "hi"}, {"prompt": chat}]


def test_file_names_are_told_from_prompts() -> None:
    assert file_names("train.parquet") == ["train.parquet"]
    assert file_names([Path("a.jsonl"), "b.parquet"]) == ["a.jsonl", "b.parquet"]
    assert file_names(["What is 1+1?", "b.parquet"]) is None


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ([], "no rows"),
        ({"train": ROWS}, r"one split: data\['train'\]"),
        ([1], "row 0 is 1; a row is a dict, a prompt, or a pair"),
        ([("a", "b", "c")], "a row is a dict, a prompt, or a pair"),
    ],
)
def test_what_is_no_row_is_refused(data: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        as_rows(data)


def test_a_row_keeps_its_columns_in_extra_info() -> None:
    row = {"question": "1+1=", "solution": 2, "level": "easy", "agent_name": "mine"}
    assert to_prompt_row(row, 0, "exact") == {
        "data_source": "exact",
        "prompt": "1+1=",
        "agent_name": "mine",
        "reward_model": {"style": "rule", "ground_truth": 2},
        "extra_info": {"level": "easy"},
    }
    assert to_prompt_row(row, 0, "exact", with_prompt=True)["extra_info"]["prompt"] == "1+1="


def test_extra_info_may_be_json_text() -> None:
    row = {"prompt": "1+1=", "answer": "2", "extra_info": '{"index": 3}'}
    assert to_prompt_row(row, 0, "exact")["extra_info"] == {"index": 3}
    with pytest.raises(DataError, match=r"row 5, column 'extra_info' must be an object, got 'x'"):
        to_prompt_row(row | {"extra_info": "x"}, 5, "exact")


def test_a_row_of_verls_schema_stays() -> None:
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "hi"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 1},
    }
    assert to_prompt_row(row, 0, "exact") == row


def test_a_row_without_a_prompt_is_named_with_its_columns() -> None:
    with pytest.raises(DataError, match=r"row 7 has no column 'prompt' or .*it has text, label"):
        to_prompt_row({"text": "x", "label": 1}, 7, "exact")


def test_supervised_rows_are_messages_or_prompt_and_response() -> None:
    assert to_sft_rows(ROWS)[0] == {"prompt": "1+1=", "response": "2"}
    chats = [{"messages": [{"role": "user", "content": "hi"}]}]
    assert to_sft_rows(chats) == chats


def test_written_rows_hold_what_numpy_and_frames_hold(tmp_path: Path) -> None:
    rows = [{"a": np.int64(1), "b": np.array([1.5]), "c": {"d": ("x",)}, "e": True}]
    (line,) = Path(write_rows(rows, tmp_path, "train")).read_text().splitlines()
    assert json.loads(line) == {"a": 1, "b": [1.5], "c": {"d": ["x"]}, "e": True}
    assert as_rows([{"prompt": "1", "answer": float("nan")}])[0]["answer"] is None


def test_the_same_rows_are_the_same_file_and_others_are_not(tmp_path: Path) -> None:
    first = write_rows(ROWS, tmp_path, "train")
    assert write_rows([dict(row) for row in ROWS], tmp_path, "train") == first
    assert write_rows(ROWS[:1], tmp_path, "train") != first


def test_a_value_that_json_cannot_hold_names_its_row(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 1 contains a bytes"):
        write_rows([{"a": 1}, {"a": b"x"}], tmp_path, "train")
    assert not list(tmp_path.iterdir())
