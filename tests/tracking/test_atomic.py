from __future__ import annotations

import os
from pathlib import Path

import pytest

from hone.tracking import atomic_path, atomic_write_bytes, atomic_write_text
from hone.tracking.atomic import remove_leftovers


def test_text_and_bytes_arrive_whole_and_leave_nothing_else(tmp_path: Path) -> None:
    atomic_write_text(tmp_path / "new" / "a.txt", "größe\n")
    atomic_write_bytes(tmp_path / "new" / "b.bin", b"\x00\xff")
    assert (tmp_path / "new" / "a.txt").read_bytes() == "größe\n".encode()
    assert (tmp_path / "new" / "b.bin").read_bytes() == b"\x00\xff"
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["a.txt", "b.bin"]


def test_a_lone_surrogate_is_written_escaped(tmp_path: Path) -> None:
    atomic_write_text(tmp_path / "a.txt", "x\ud800y")
    assert (tmp_path / "a.txt").read_text() == "x\\ud800y"


def test_the_old_file_stays_while_the_new_one_is_written(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    with atomic_path(target) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
        assert temporary.parent == target.parent  # a rename cannot cross file systems
    assert target.read_text() == "new"


def test_a_failed_write_keeps_the_old_file_and_cleans_up(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")

    def fail() -> None:
        with atomic_path(target) as temporary:
            temporary.write_text("half")
            raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="disk on fire"):
        fail()
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    assert target.read_text() == "old"


def test_content_reaches_the_disk_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real_sync, real_replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("sync"), real_sync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("rename"), real_replace(a, b))[1])
    atomic_write_text(tmp_path / "a.txt", "x")
    assert order == ["sync", "rename", "sync"]


def test_leftovers_of_a_killed_writer_are_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".metrics.jsonl.77.tmp").write_text("half")
    (tmp_path / "notes.tmp").write_text("the user's")
    (tmp_path / ".hidden").write_text("the user's")
    (tmp_path / ".global_step_5.tmp").mkdir()  # a half written checkpoint is not ours to judge
    removed = remove_leftovers(tmp_path)
    assert [p.name for p in removed] == [".metrics.jsonl.77.tmp"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".global_step_5.tmp",
        ".hidden",
        "notes.tmp",
    ]
