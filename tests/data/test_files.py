"""Files under verl's names: local ones stay, remote ones are copied once through the `hdfs` command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hone.data import files

REMOTE = "hdfs://host/folder/file.txt"


@pytest.fixture
def hdfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command that notes its arguments, and makes the file that `-get` asks for."""
    noted = tmp_path / "calls.txt"
    command = tmp_path / "bin" / "hdfs"
    command.parent.mkdir()
    command.write_text(
        f'#!/bin/sh\necho "$@" >> {noted}\n[ "$2" = "-get" ] && echo text > "$5"\n'
        '[ "$2" != "-test" ] || [ "$4" = "hdfs://yes" ]\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    return noted


def test_a_local_path_and_a_models_name_stay(tmp_path: Path) -> None:
    assert files.copy_to_local(str(tmp_path)) == str(tmp_path)
    assert files.copy_to_local("Qwen/Qwen3-0.6B", use_shm=True) == "Qwen/Qwen3-0.6B"


def test_a_remote_file_is_copied_once_or_again_where_asked(hdfs: Path, tmp_path: Path) -> None:
    target = files.copy_to_local(REMOTE, cache_dir=tmp_path / "cache")
    assert target == str(tmp_path / "cache" / files.md5_encode(REMOTE) / "file.txt")
    assert Path(target).read_text() == "text\n"
    files.copy_to_local(REMOTE, cache_dir=tmp_path / "cache")
    assert len(hdfs.read_text().splitlines()) == 1
    files.copy_to_local(REMOTE, cache_dir=tmp_path / "cache", always_recopy=True)
    assert hdfs.read_text().splitlines() == [f"dfs -get -f {REMOTE} {target}"] * 2


def test_folders_are_made_and_files_sent(hdfs: Path, tmp_path: Path) -> None:
    files.makedirs("hdfs://a/b")
    files.copy(src=str(tmp_path), dst="hdfs://a/b")
    files.copy("hdfs://a", "hdfs://b")
    assert hdfs.read_text().splitlines() == [
        "dfs -mkdir -p hdfs://a/b",
        f"dfs -put -f {tmp_path} hdfs://a/b",
        "dfs -cp -f hdfs://a hdfs://b",
    ]
    assert files.exists("hdfs://yes")
    assert not files.exists("hdfs://no")


def test_local_folders_are_made_and_copied_into_each_other(tmp_path: Path) -> None:
    files.makedirs(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "f").write_text("x")
    files.makedirs(tmp_path / "c")
    assert files.copy(tmp_path / "a", tmp_path / "c")
    assert files.copy(tmp_path / "a" / "b" / "f", tmp_path / "g")
    assert files.exists(tmp_path / "c" / "b" / "f")
    assert files.exists(tmp_path / "g")
    with pytest.raises(FileExistsError):
        files.makedirs(tmp_path / "a")


def test_without_the_command_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OSError, match="no `hdfs` command on PATH"):
        files.makedirs("hdfs://a")


def test_a_config_is_looked_for_here_and_beside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").touch()
    assert files.resolve_config_path("a.yaml") == str(tmp_path / "a.yaml")
    assert files.resolve_config_path("/x/y.yaml") == "/x/y.yaml"
    assert files.resolve_config_path("hone/cli.py").endswith("hone/cli.py")
    with pytest.raises(FileNotFoundError, match="give an absolute path"):
        files.resolve_config_path("b.yaml")
