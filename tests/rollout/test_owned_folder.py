"""The folders of killed processes are deleted; the folders of running processes stay."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from hone.rollout import owned_folder
from hone.rollout.owned_folder import OwnedFolder


@pytest.mark.parametrize("in_parent", [True, False])
def test_the_folder_of_a_killed_process_is_deleted_and_that_of_a_living_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_parent: bool
) -> None:
    monkeypatch.setattr(owned_folder, "SHARED_MEMORY", tmp_path)
    code = (
        "import os, pathlib, sys; from hone.rollout.owned_folder import OwnedFolder;"
        "folder = OwnedFolder('run-', pathlib.Path(sys.argv[1]));"
        "(folder.path / 'update').mkdir(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    (abandoned,) = tmp_path.iterdir()
    (tmp_path / "run-of-another-machine").mkdir()
    parent = tmp_path if in_parent else None
    living = OwnedFolder("run-", parent)
    assert not abandoned.exists()
    another = OwnedFolder("run-", parent)
    assert living.path.exists()
    assert living.path != another.path
    living.close()
    another.close()
    assert [path.name for path in tmp_path.iterdir()] == ["run-of-another-machine"]


def test_folders_of_a_machine_with_a_longer_name_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node")
    other = tmp_path / "run-node-1-abcdefgh"
    other.mkdir()
    OwnedFolder("run-", tmp_path).close()
    assert other.exists()


def test_a_file_server_without_locks_keeps_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    first, second = OwnedFolder("run-", tmp_path), OwnedFolder("run-", tmp_path)
    assert first.path.exists()
    for folder in (first, second):
        folder.close()
    assert list(tmp_path.iterdir()) == []
