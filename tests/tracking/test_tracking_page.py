"""The code in docs/tracking.md runs and does what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tracking.md"


def test_the_code_on_the_page_runs_and_writes_the_files_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mail: list[str] = []
    names: dict[str, Any] = {"send": mail.append}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(block, names)
    for file in ("config.yaml", "metrics.jsonl", "curve.png"):
        assert (tmp_path / "runs" / "mine" / file).is_file()
    assert (tmp_path / "report.html").is_file()


def test_every_name_in_the_tables_exists() -> None:
    from hone.tracking.tracking import TRACKERS

    text = PAGE.read_text(encoding="utf-8")
    for name in TRACKERS.names():
        assert f"`{name}`" in text
