from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow.parquet import read_table

from hone.data.hub import as_hf_dataset, hub_splits
from hone.data.prepare import prepare
from hone.data.preprocess.maths import _DAPO_END, _DAPO_START
from hone.data.rows import DataError


class Picture:
    """An image as `datasets` returns it."""

    size = (1, 1)

    def save(self, buffer: Any, format: str) -> None:
        buffer.write(format.encode())


def fake_datasets_package(monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))


def test_splits_become_plain_rows_and_images_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_datasets_package(
        monkeypatch, lambda name: {"train": [{"images": [Picture()], "problem": name}]}
    )
    assert hub_splits("a/b", None) == {
        "train": [{"images": [{"bytes": b"PNG", "path": None}], "problem": "a/b"}]
    }


def test_a_data_set_is_read_once_with_its_config(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    requests = []

    def load(*names: str) -> dict[str, list[dict[str, str]]]:
        requests.append(names)
        record = {"question": "q", "answer": "#### 1"}
        return {"train": [record], "test": [record]}

    fake_datasets_package(monkeypatch, load)
    report = prepare("gsm8k", local_dir=tmp_path, hub=True)
    assert list(report.rows.values()) == [1, 1]
    assert requests == [("openai/gsm8k", "main")]


DAPO_ROW = {
    "prompt": [{"role": "user", "content": f"{_DAPO_START}1+1?{_DAPO_END}"}],
    "reward_model": {"ground_truth": "2"},
}


@pytest.mark.parametrize(
    ("name", "split", "record"),
    [
        ("svamp", "test", {"Body": "Ann has one.", "Question": "1+1?", "Answer": "2.0"}),
        ("asdiv", "validation", {"body": "Ann has one.", "question": "1+1?", "answer": "2 (owls)"}),
        ("mawps", "test", {"id": "a", "question": "1+1?", "result": "2"}),
        ("olympiadbench", "test", {"question": "1+1?", "answer": None, "final_answer": ["2"]}),
        ("dapo_math", "train", DAPO_ROW),
    ],
)
def test_the_columns_of_each_benchmark_on_the_hub_are_read(
    name: str,
    split: str,
    record: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    fake_datasets_package(monkeypatch, lambda _: {split: [record, record]})
    report = prepare(name, local_dir=tmp_path, hub=True)
    ((file, count),) = report.rows.items()
    assert count == (1 if name == "dapo_math" else 2)  # the Hub repeats DAPO's problems
    row = read_table(file).to_pylist()[0]
    text = row["prompt"][0]["content"]
    assert "1+1?" in text
    assert ("Ann has one. 1+1?" in text) == (name in ("svamp", "asdiv"))
    assert text.count("step by step") == 1
    assert row["reward_model"]["ground_truth"] == "2"


def test_a_benchmark_without_answers_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_datasets_package(monkeypatch, lambda _: {"test": [{"question": "1+1?"}]})
    with pytest.raises(DataError, match="record 0 of mawps has no answer, but question"):
        prepare("mawps", local_dir=tmp_path, hub=True)


def test_the_columns_of_taco_on_the_hub_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tests = '{"inputs": ["1"], "outputs": ["2"]}'
    record = {"question": "Add one.", "starter_code": "def f(x):\n", "input_output": tests}
    fake_datasets_package(monkeypatch, lambda _: {"train": [record]})
    ((file, _),) = prepare("taco", local_dir=tmp_path, hub=True).rows.items()
    (row,) = read_table(file).to_pylist()
    assert "Add one.\n```python\ndef f(x):\n```\n" in row["prompt"][0]["content"]
    assert row["reward_model"]["ground_truth"] == tests


def test_a_hub_that_cannot_be_reached_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise ConnectionError("no route")

    fake_datasets_package(monkeypatch, load)
    with pytest.raises(
        DataError, match=r"a/b could not be read from the Hub: no route.*source_dir"
    ):
        hub_splits("a/b", None)


def test_a_column_that_the_first_row_lacks_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = SimpleNamespace(
        from_dict=dict, from_list=lambda rows: {n: [r.get(n) for r in rows] for n in rows[0]}
    )
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(Dataset=dataset))
    rows = [{"prompt": "a"}, {"prompt": "b", "tools_kwargs": {"x": {}}}]
    assert as_hf_dataset(rows) == {"prompt": ["a", "b"], "tools_kwargs": [None, {"x": {}}]}
