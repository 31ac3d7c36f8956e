"""The documentation site builds without a warning, and has what the README and the nav promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def pages_of(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    inner = nav.values() if isinstance(nav, dict) else nav
    return [page for item in inner for page in pages_of(item)]  # type: ignore[attr-defined]


def test_every_page_of_docs_is_in_the_navigation() -> None:
    import yaml

    listed = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    docs = ROOT / "docs"
    assert {p.relative_to(docs).as_posix() for p in docs.rglob("*.md")} <= set(listed)
    assert len(listed) == len(set(listed))


@pytest.mark.slow
def test_the_site_builds_strictly_with_search_and_api_pages(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))
    places = {page["location"] for page in found["docs"]}
    assert {"python/", "config/", "api/python/#hone.api.train"} <= places
    assert "files/notebooks/train.ipynb" in (tmp_path / "python" / "index.html").read_text()
    assert (tmp_path / "files" / "notebooks" / "train.ipynb").is_file()
