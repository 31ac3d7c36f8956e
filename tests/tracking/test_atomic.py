from __future__ import annotations

import os
from pathlib import Path

import pytest

from hone.tracking import atomic_path, atomic_write_bytes, atomic_write_text
from hone.tracking.atomic import apply_umask, make_folder, remove_leftovers, rename_folder


def test_text_and_bytes_are_written_without_other_files(tmp_path: Path) -> None:
    atomic_write_text(tmp_path / "new" / "a.txt", "größe\n")
    atomic_write_bytes(tmp_path / "new" / "b.bin", b"\x00\xff")
    assert (tmp_path / "new" / "a.txt").read_bytes() == "größe\n".encode()
    assert (tmp_path / "new" / "b.bin").read_bytes() == b"\x00\xff"
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["a.txt", "b.bin"]


def test_a_lone_surrogate_is_written_escaped(tmp_path: Path) -> None:
    atomic_write_text(tmp_path / "a.txt", "x\ud800y")
    assert (tmp_path / "a.txt").read_text() == "x\\ud800y"


def test_the_old_file_exists_while_the_new_one_is_written(tmp_path: Path) -> None:
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


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Every sync and rename from here on, with the file's name."""
    calls: list[tuple[str, str]] = []
    real_sync, real_rename = os.fsync, os.rename

    def sync(handle: int) -> None:
        calls.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        real_sync(handle)

    def rename(source: str, target: str) -> None:
        calls.append(("rename", str(target)))
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    return calls


def test_the_content_of_a_folder_is_synced_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / ".new.tmp", tmp_path / "new"
    (source / "a" / "b").mkdir(parents=True)
    for name in ("top", "a/middle", "a/b/deep"):
        (source / name).write_text("x")
    (source / "link").symlink_to("/nowhere")
    calls = recorded(monkeypatch)
    rename_folder(source, target)
    before = [
        name for kind, name in calls[: calls.index(("rename", str(target)))] if kind == "sync"
    ]
    for name in ("top", "a/middle", "a/b/deep", "a/b", "a", ""):
        assert str(source / name) in before
    assert before.index(str(source / "a/b/deep")) < before.index(str(source / "a/b"))
    assert calls[-1] == ("sync", str(tmp_path))


def test_new_folders_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded(monkeypatch)
    assert make_folder(tmp_path / "a" / "b") == [tmp_path / "a" / "b", tmp_path / "a"]
    assert calls == [("sync", str(tmp_path)), ("sync", str(tmp_path / "a"))]
    assert make_folder(tmp_path / "a" / "b") == []


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_get_the_permissions_of_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    private, script = tmp_path / "weights", tmp_path / "script"
    for file, initial_mode in ((private, 0o600), (script, 0o755)):
        file.touch()
        file.chmod(initial_mode)
    before = os.umask(umask)
    try:
        apply_umask(tmp_path)
    finally:
        os.umask(before)
    assert private.stat().st_mode & 0o777 == mode
    assert script.stat().st_mode & 0o777 == 0o755
    assert sorted(p.name for p in tmp_path.iterdir()) == ["script", "weights"]


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
