from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hone.data.prepare import DATASETS
from hone.data.preprocess.sources import Source, Splits


def write(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(name: str, folder: Path) -> Splits:
    builder = DATASETS[name].source_builder
    assert builder is not None
    return builder(source=Source(folder))


def truth_of(row: dict[str, Any]) -> dict[str, Any]:
    tests: dict[str, Any] = json.loads(row["reward_model"]["ground_truth"])
    return tests


def run(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(source, names)
    return names


def test_humanevals_check_is_called_with_the_entry_point(tmp_path: Path) -> None:
    record = {
        "task_id": "HumanEval/0",
        "prompt": "def one():\n",
        "entry_point": "one",
        "test": "def check(f):\n    assert f() == 1\n",
    }
    write(tmp_path / "humaneval/test.jsonl", [record])
    (row,) = rows_of("humaneval", tmp_path)["test"]
    run("def one():\n    return 1\n" + truth_of(row)["functional"])
    assert row["data_source"] == "humaneval"
    assert "def one():" in row["prompt"][0]["content"]


def test_mbpps_records_go_to_the_split_they_name(tmp_path: Path) -> None:
    records = [
        {"text": "t", "task_id": i, "test_setup_code": "x = 1", "test_list": ["assert x == 1"]}
        for i in range(4)
    ]
    for record, split in zip(records, ["train", "val", "test", "prompt"], strict=True):
        record["split"] = split
    write(tmp_path / "mbpp/mbpp.jsonl", records)
    rows_by_split = rows_of("mbpp", tmp_path)
    assert {split: len(rows) for split, rows in rows_by_split.items()} == {
        "train": 1,
        "validation": 1,
        "test": 1,
    }
    run(truth_of(rows_by_split["test"][0])["functional"])
    assert "assert x == 1" in rows_by_split["test"][0]["prompt"][0]["content"]


def test_leetcodes_test_has_a_place_for_the_program(tmp_path: Path) -> None:
    record = {
        "task_id": "two-sum",
        "prompt": "from typing import *\n",
        "entry_point": "Solution().two",
        "problem_description": "Give two.",
        "starter_code": "class Solution:\n    def two(self) -> List[int]:\n        ",
        "test": "def check(f):\n    assert f() == [2]\n",
    }
    write(tmp_path / "leetcode/test_v0.3.1.jsonl", [record])
    (row,) = rows_of("leetcode", tmp_path)["test"]
    program = "class Solution:\n    def two(self) -> List[int]:\n        return [2]\n"
    run(truth_of(row)["functional"].replace("__CODE__", program))
    assert "class Solution" in row["prompt"][0]["content"]


def test_tacos_tests_are_kept_as_json_whatever_their_shape(tmp_path: Path) -> None:
    shapes = [{"inputs": ["1"], "outputs": ["2"]}, {"functional": "assert True"}]
    write(tmp_path / "taco/test.jsonl", [{"prompt": "p", "tests": tests} for tests in shapes])
    assert [truth_of(row) for row in rows_of("taco", tmp_path)["test"]] == shapes
