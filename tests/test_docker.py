"""The Dockerfiles install what the constraints pin, and copy only what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "docker").glob("Dockerfile.*"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.suffix[1:])
def test_a_dockerfile_is_pinned_and_copies_what_exists(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (.+)$", text, flags=re.M):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources), line
    installs = re.findall(r"^RUN pip install (.+)$", text, flags=re.M)
    assert "'^torch==' constraints.txt" in installs[0]
    assert all("constraints.txt" in install for install in installs)
    assert re.search(r"^FROM \S+:[\d.]+-slim-\w+$", text, flags=re.M)
    assert re.search(r"^USER (?!root)", text, flags=re.M)
    python = re.search(r"^FROM python:(3\.\d+)", text, flags=re.M)
    assert python is not None
    assert python[1] in ("3.10", "3.11", "3.12", "3.13")
