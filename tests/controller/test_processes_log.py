"""A process's last words, read from plain files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hone.controller.processes import MAX_LOG_LINES, last_lines

pytestmark = pytest.mark.slow


def test_the_last_lines_of_every_file_that_is_there(tmp_path: Path) -> None:
    long, short = tmp_path / "err", tmp_path / "out"
    long.write_text("".join(f"line {i}\n" for i in range(100)))
    short.write_bytes(b"only\xff\n\n")
    found = last_lines([str(long), str(tmp_path / "missing"), str(short)])
    assert found == [f"line {i}" for i in range(100 - MAX_LOG_LINES, 100)] + ["only\ufffd"]


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(1 << 40)  # takes no space, and no process could read it
        file.seek(0, 2)
        file.write(b"\nthe last words\n")
    assert last_lines([str(log), str(tmp_path)])[-1] == "the last words"


def test_markers_of_ray_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(":job_id:01\n:actor_name:x\nhello\n")
    assert last_lines([str(tmp_path / "log")]) == ["hello"]


def test_a_process_finds_the_files_it_writes_to_and_no_pipes(tmp_path: Path) -> None:
    code = (
        "import sys; from hone.controller.processes import own_log_files; "
        "sys.stdout.write(repr(own_log_files()))"
    )
    with (tmp_path / "err").open("w") as err:
        done = subprocess.run([sys.executable, "-c", code], stdout=-1, stderr=err, text=True)
    assert done.stdout == repr((str(tmp_path / "err"),))
