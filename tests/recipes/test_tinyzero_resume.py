"""TinyZero's script takes what is there for whole, so each of its steps writes all or nothing."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hone.data.prepare import prepare_from_arguments

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "tinyzero"


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(name)


class Killed(BaseException):
    """Stands for a kill: nothing may catch it and go on."""


def test_a_kill_while_solutions_are_written_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked = module("worked", monkeypatch)
    narrow = ["--max_numbers", "3", "--max_number", "9", "--max_target", "20"]
    sizes = ["--train_size", "20", "--test_size", "5"]
    prepare_from_arguments("countdown", ["--local_dir", str(tmp_path), *sizes, *narrow])
    out = tmp_path / "worked.parquet"

    def torn(table: object, where: Path, **more: Any) -> None:
        Path(where).write_bytes(b"PAR1")
        assert not out.exists()
        raise Killed

    monkeypatch.setattr(worked.pq, "write_table", torn)
    monkeypatch.setattr(
        "sys.argv", ["worked.py", str(out), "--rl", str(tmp_path), "--rows", "5", *narrow]
    )
    with pytest.raises(Killed):
        worked.main()
    assert not out.exists()


def test_a_kill_while_the_model_is_written_leaves_no_folder_and_the_next_run_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = module("base_model", monkeypatch)
    out, whole = tmp_path / "base", base.save_pretrained

    def torn(lm: Any, tokenizer: Any, folder: Path) -> None:
        whole(lm, tokenizer, folder)
        (folder / "tokenizer.json").unlink()
        raise Killed

    size = ["--hidden", "16", "--layers", "1", "--heads", "2", "--coarse"]
    monkeypatch.setattr("sys.argv", ["base_model.py", str(out), *size])
    monkeypatch.setattr(base, "save_pretrained", torn)
    with pytest.raises(Killed):
        base.main()
    assert not out.exists()
    monkeypatch.setattr(base, "save_pretrained", whole)
    base.main()
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    assert {"config.json", "tokenizer.json"} <= {path.name for path in out.iterdir()}
    with pytest.raises(SystemExit):
        base.main()
    assert "is there already" in capsys.readouterr().err


def test_a_kill_while_the_curves_are_drawn_keeps_the_ones_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curves = module("curves", monkeypatch)
    measured = json.loads((FOLDER / "results" / "cpu" / "curves.json").read_text())
    monkeypatch.setattr(curves, "collect", lambda folder: measured)
    monkeypatch.setattr("sys.argv", ["curves.py", str(tmp_path), str(tmp_path / "out")])
    curves.main()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {"out.json", "out.png"}
    assert before["out.png"].startswith(b"\x89PNG")

    def full(descriptor: int) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "fsync", full)
    measured["sft"]["steps"] += 1
    with pytest.raises(OSError, match="no space left"):
        curves.main()
    with pytest.raises(OSError, match="no space left"):
        curves.draw(measured, tmp_path / "out.png")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


STAND_IN = """#!/bin/bash
# Stands for python: notes the step; makes what it would make, unless it is the one to be killed in.
step=$(basename "${1/#-m/$2}"); step=${step%.py}
echo "$step" >> "$LOG"
[ "$step" = "$KILLED_IN" ] && exit 137
case $step in
    worked) mkdir -p "$(dirname "$2")"; touch "$2" ;;
    base_model) mkdir -p "$2" ;;
esac
exit 0
"""


def test_started_again_the_script_makes_only_what_is_missing(tmp_path: Path) -> None:
    stand_in, log = tmp_path / "python", tmp_path / "log"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)

    def start(killed_in: str) -> tuple[int, list[str]]:
        log.write_text("")
        script = FOLDER / "scripts" / "reproduce.sh"
        environment = os.environ | {
            "PYTHON": str(stand_in),
            "LOG": str(log),
            "KILLED_IN": killed_in,
        }
        arguments = ["bash", str(script), str(tmp_path / "out"), "--small"]
        done = subprocess.run(arguments, env=environment, capture_output=True, timeout=120)
        return done.returncode, log.read_text().split()

    trained = ["hone.trainer.main_sft", "hone.trainer.main_ppo", "hone.trainer.main_ppo", "curves"]
    assert start("worked") == (137, ["hone.cli", "worked"])
    assert start("base_model") == (137, ["hone.cli", "worked", "base_model"])
    assert start("hone.trainer.main_sft") == (137, ["base_model", "hone.trainer.main_sft"])
    assert start("") == (0, trained)
