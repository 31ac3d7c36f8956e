"""`hone quickstart` around its training: what it checks first, deletes, keeps and proposes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hone import cli
from hone.config import compose
from hone.trainer import main_ppo, quickstart


@pytest.fixture
def dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`hone quickstart` without its two minutes: the model and the run are files that stand for them."""

    def base(folder: Path, seed: int) -> Path:
        folder.mkdir()
        (folder / "weights").write_text(f"seed {seed}")
        return folder

    def run(config: Any) -> None:
        folder = Path(config.trainer.default_local_dir)
        folder.mkdir()
        (folder / "metrics.jsonl").touch()

    def summary(folder: Path, run: Path, config: Any, **times: float) -> None:
        assert (run / "metrics.jsonl").is_file()
        (folder / "curve.png").touch()

    monkeypatch.setattr(quickstart, "build_base_policy", base)
    monkeypatch.setattr(quickstart, "summarise", summary)
    monkeypatch.setattr(main_ppo, "run", run)
    return lambda *more: cli.main(["quickstart", "--out", str(tmp_path / "q"), *more])


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def test_a_wrong_key_is_told_before_anything_is_touched(
    dry: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry("bogus=1") == 2
    assert "no key 'bogus'" in capsys.readouterr().err
    assert not (tmp_path / "q").exists()
    assert dry() == 0
    (tmp_path / "q" / "seed-1" / "run" / "note.txt").touch()
    assert dry("algorithm.adv_estimator=grop") == 2
    assert (tmp_path / "q" / "seed-1" / "run" / "note.txt").is_file()


def test_its_own_output_is_made_anew(dry: Callable[..., int], tmp_path: Path) -> None:
    for _ in range(2):
        assert dry() == 0
        made = tmp_path / "q" / "seed-1"
        assert names(made) == {
            ".quickstart",
            "train.jsonl",
            "test.jsonl",
            "base",
            "run",
            "curve.png",
        }
        (made / "run" / "from_before").touch()
    assert names(tmp_path / "q") == {"seed-1"}
    assert dry("--seed", "2", f"trainer.default_local_dir={tmp_path / 'elsewhere'}") == 0
    assert names(tmp_path / "q") == {"seed-1", "seed-2"}


def test_what_it_did_not_make_is_kept(
    dry: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "q" / "seed-1"
    folder.mkdir(parents=True)
    assert dry() == 0  # an empty folder is nobody's
    (folder / "thesis.txt").write_text("mine")
    assert dry() == 0
    assert (tmp_path / "q" / "seed-1.earlier-1" / "thesis.txt").read_text() == "mine"
    assert "kept as" in capsys.readouterr().out
    (folder / ".quickstart").unlink()  # looks alike, is not marked
    assert dry() == 0
    assert names(tmp_path / "q") == {"seed-1", "seed-1.earlier-1", "seed-1.earlier-2"}
    assert (folder / "train.jsonl").stat().st_size > 0


@pytest.mark.parametrize("command", quickstart.NEXT)
def test_a_command_it_proposes_would_start_and_reads_only_the_users_files(command: str) -> None:
    _, verb, *words = command.partition("#")[0].split()
    overrides = [word for word in words if "=" in word]
    if verb == "quickstart":
        files = {name: Path(name) for name in quickstart.DATA}
        overrides = [*quickstart.overrides(files, Path("m"), Path("r"), 1), *overrides]
    data = compose(overrides).config.data
    assert "gsm8k" not in str((data.train_files, data.val_files))
