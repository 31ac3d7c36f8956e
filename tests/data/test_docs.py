"""The Python of docs/data.md runs, and its curriculum sampler resumes exactly."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hone.data.check import check_file
from hone.data.loader import PromptLoader
from hone.data.prepare import DATASETS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)


def test_the_example_rows_pass_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(BLOCKS[0], {})
    assert check_file(tmp_path / "train.jsonl")[0] == 0


def test_the_example_sampler_resumes_exactly() -> None:
    names: dict[str, Any] = {}
    exec(BLOCKS[1], names)
    data: Any = [{"n": i} for i in range(7)]

    def start() -> PromptLoader:
        sampler = names["EasyFirst"](data, None)
        return PromptLoader(data, 2, shuffle=True, seed=0, drop_last=True, sampler=sampler)

    def run(loader: PromptLoader, steps: int) -> list[list[int]]:
        drawn = []
        for _ in range(steps):
            batch = loader.next_batch()
            drawn.append(list(batch["n"]))
            scores = np.array([[n % 3 == 0] for n in batch["n"]], dtype=float)
            loader.on_batch_end(
                SimpleNamespace(batch={"token_level_scores": scores}, non_tensor_batch=batch)
            )
        return drawn

    whole = run(start(), 14)
    assert whole[3:6] != whole[:3]
    for before in range(8):
        stopped = start()
        run(stopped, before)
        resumed = start()
        resumed.load_state_dict(stopped.state_dict())
        assert run(resumed, 6) == whole[before : before + 6]


def test_every_data_set_is_listed() -> None:
    table = PAGE[PAGE.index("## Ready-made") :]
    words = set(re.findall(r"[\w]+", table))
    assert set(DATASETS) <= words
