"""`hone quickstart` around its training: what it checks first, deletes, keeps and proposes."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hone import cli
from hone.trainer import main_ppo, quickstart
from hone.verl.dialect import compose


@pytest.fixture
def dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`hone quickstart` without its two minutes: the model and the run are files that stand for them."""

    def base(folder: Path, seed: int, threads: int) -> Path:
        assert threads >= 1
        folder.mkdir()
        (folder / "weights").write_text(f"seed {seed}")
        return folder

    def run(config: Any, origins: object) -> None:
        assert config.trainer.num_threads >= 1
        folder = Path(config.trainer.default_local_dir)
        folder.mkdir()
        (folder / "metrics.jsonl").touch()

    def summary(folder: Path, run: Path, config: Any, **times: float) -> None:
        assert (run / "metrics.jsonl").is_file()
        (folder / "curve.png").touch()

    monkeypatch.setattr(quickstart, "build_base_policy", base)
    monkeypatch.setattr(quickstart, "print_summary", summary)
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
        folder = tmp_path / "q" / "seed-1"
        assert names(folder) == {
            ".quickstart",
            "train.jsonl",
            "test.jsonl",
            "base",
            "run",
            "curve.png",
        }
        (folder / "run" / "from_before").touch()
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
    assert "renamed to" in capsys.readouterr().out
    (folder / ".quickstart").unlink()  # looks alike, is not marked
    assert dry() == 0
    assert names(tmp_path / "q") == {"seed-1", "seed-1.earlier-1", "seed-1.earlier-2"}
    assert (folder / "train.jsonl").stat().st_size > 0


def words_of(command: str) -> list[str]:
    return shlex.split(command, comments=True)


@pytest.mark.parametrize("command", quickstart.next_commands(Path("q") / "seed-1"))
def test_a_command_it_proposes_would_start_and_reads_only_its_own_files(command: str) -> None:
    _, verb, *words = words_of(command)
    overrides = [word for word in words if "=" in word]
    if verb == "quickstart":
        files = {name: Path(name) for name in quickstart.DATA_FILES}
        overrides = [*quickstart.overrides(files, Path("m"), Path("r"), 1), *overrides]
    data = compose(overrides).config.data
    assert "gsm8k" not in str((data.train_files, data.val_files))


@pytest.mark.slow
def test_the_run_of_ones_own_that_it_proposes_starts_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the files and the base that a quickstart leaves, in a folder whose name has a blank."""
    monkeypatch.setattr(quickstart, "SFT_STEPS", 2)
    folder = tmp_path / "my runs" / "seed-1"
    folder.mkdir(parents=True)
    quickstart.write_data(
        {name: folder / file for name, file in quickstart.DATA_FILES.items()}, seed=1
    )
    quickstart.build_base_policy(folder / quickstart.BASE_FOLDER, seed=1, threads=1)
    program, *words = words_of(quickstart.next_commands(folder)[-1])
    assert program == "hone"
    assert cli.main([*words, "trainer.total_training_steps=1", "data.val_max_samples=4"]) == 0
    assert (tmp_path / "my runs" / "seed-1-by-hand" / "global_step_1" / "actor").is_dir()


def test_the_answers_it_shows_are_those_that_improved_most(tmp_path: Path) -> None:
    (tmp_path / "validation").mkdir()
    scores = {0: [1.0, 0.1, 0.0, 0.1, 0.1], 150: [1.0, 1.0, 0.1, 1.0, 0.1]}
    for step, column in scores.items():
        rows = [
            {"prompt_text": f"{i}+1=", "response_text": f"{step}: {score}", "score": score}
            for i, score in enumerate(column)
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "validation" / f"step_{step}.parquet")
    assert quickstart.most_improved(tmp_path, 0, 150) == [
        ("1+1=", "0: 0.1", "150: 1.0"),
        ("3+1=", "0: 0.1", "150: 1.0"),
        ("2+1=", "0: 0.0", "150: 0.1"),
    ]


def test_its_folder_may_have_any_name() -> None:
    folder = Path("it's [a], b")
    files = {name: folder / file for name, file in quickstart.DATA_FILES.items()}
    config = compose(quickstart.overrides(files, folder / "m", folder / "run", 1)).config
    assert config.data.train_files == (str(files["train"]),)
    assert config.trainer.default_local_dir == str(folder / "run")


def test_make_quickstart_installs_no_development_tools_and_shows_progress(tmp_path: Path) -> None:
    root = Path(quickstart.__file__).resolve().parents[2]
    command = ["make", "-n", "-C", str(root), "quickstart", f"VENV={tmp_path}/new"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    installs = [line for line in printed.splitlines() if "pip install" in line]
    assert installs
    for line in installs:
        assert "[" not in line
        assert " -q" not in line
    assert f"{tmp_path}/new/bin/hone quickstart" in printed
