"""Programs beside the package import only names that the package has; no other test runs all of them."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(
    file
    for folder in ("benchmarks", "examples", "recipe", "recipes")
    for file in (ROOT / folder).rglob("*.py")
)


def missing_names(source: str) -> list[str]:
    """Returns the names of hone that a program imports and that do not exist."""
    missing = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "hone":
            continue
        module = importlib.import_module(str(node.module))
        for alias in node.names:
            if not hasattr(module, alias.name):
                try:
                    importlib.import_module(f"{node.module}.{alias.name}")
                except ModuleNotFoundError:
                    missing.append(f"{node.module}.{alias.name}")
    return missing


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_program_imports_names_that_exist(file: Path) -> None:
    assert missing_names(file.read_text(encoding="utf-8")) == []


def test_a_name_that_is_gone_is_found() -> None:
    assert missing_names("from hone.data.sft import gone, SFTDataset") == ["hone.data.sft.gone"]
