"""`hone recipes`: what is listed, where it is copied to, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone import cli
from hone.trainer import subcommands

ROOT = Path(__file__).resolve().parents[2]


def files_in(folder: Path) -> set[str]:
    files = (p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    return {str(p) for p in files if "__pycache__" not in p.parts}


def test_every_recipe_and_the_examples_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [
        *sorted(p.name for p in (ROOT / "recipes").iterdir() if p.is_dir()),
        "examples",
    ]


@pytest.mark.parametrize(("name", "target"), [("sums", "recipes/sums"), ("examples", "examples")])
def test_a_copy_lies_where_its_commands_look_for_it(
    name: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["recipes", name]) == 0
    assert files_in(tmp_path / target) == files_in(ROOT / target)
    assert cli.main(["recipes", name, "elsewhere"]) == 0
    assert files_in(tmp_path / "elsewhere") == files_in(ROOT / target)


def test_nothing_is_copied_over_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["recipes", "sums", str(tmp_path)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert not files_in(tmp_path)


def test_a_wrong_name_gets_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes", "tinyzer"]) == 2
    assert "Did you mean 'tinyzero'?" in capsys.readouterr().err


def test_a_package_without_recipes_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subcommands.hone, "__file__", str(tmp_path / "hone" / "__init__.py"))
    assert cli.main(["recipes"]) == 2
    assert "came without recipes" in capsys.readouterr().err
