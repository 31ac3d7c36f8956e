from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hone.data.hub import as_hf_dataset, hub_splits
from hone.data.prepare import prepare
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
