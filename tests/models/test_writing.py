"""Folders are written atomically; saving shows no progress bar and restores the user's setting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.utils import logging

from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
from hone.models.writing import staged_folder, without_progress_bar


def test_saving_a_model_shows_no_progress_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = character_tokenizer()
    save_pretrained(tiny_lm(len(tokenizer)), tokenizer, tmp_path)
    assert "Writing model shards" not in capsys.readouterr().err


@pytest.mark.parametrize("enabled", [True, False])
def test_the_setting_is_restored(enabled: bool) -> None:
    before = logging.is_progress_bar_enabled()
    try:
        (logging.enable_progress_bar if enabled else logging.disable_progress_bar)()
        with without_progress_bar():
            assert not logging.is_progress_bar_enabled()
        assert logging.is_progress_bar_enabled() == enabled
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()


def test_a_folder_appears_when_all_files_are_written(tmp_path: Path) -> None:
    (tmp_path / ".out.tmp").mkdir()
    (tmp_path / ".out.tmp" / "left").write_text("by a kill")
    (tmp_path / "out").mkdir()
    with staged_folder(tmp_path / "out") as temporary:
        (temporary / "file").write_text("x")
        assert not list((tmp_path / "out").iterdir())
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["file"]


def test_saved_models_are_readable_as_the_umask_says(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    before = os.umask(0o022)
    try:
        save_pretrained(tiny_lm(len(tokenizer)), tokenizer, tmp_path / "plain")
        with staged_folder(tmp_path / "whole") as temporary:
            (temporary / "model.safetensors").touch(mode=0o600)
    finally:
        os.umask(before)
    files = [*(tmp_path / "plain").iterdir(), *(tmp_path / "whole").iterdir()]
    assert {oct(file.stat().st_mode & 0o777) for file in files} == {"0o644"}


def test_two_processes_do_not_write_one_folder(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, hone.models.writing as w\n"
        "with w.staged_folder(pathlib.Path(sys.argv[1])): pass"
    )
    with staged_folder(tmp_path / "out"):
        process = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "out")], capture_output=True, text=True
        )
    assert process.returncode != 0
    assert "FolderLocked" in process.stderr


def test_an_error_leaves_no_folder(tmp_path: Path) -> None:
    def killed() -> None:
        with staged_folder(tmp_path / "out") as temporary:
            (temporary / "file").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed()
    assert not list(tmp_path.iterdir())
