"""The lock of a folder: one holder, told from a dead one, on this machine and on others."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hone.tracking import lock
from hone.tracking.lock import (
    LOCK,
    FolderLocked,
    Holder,
    LockLost,
    lock_folder,
    lock_target,
    require_lock,
)

STARTER = """
import sys, time
from hone.tracking.lock import FolderLocked, lock_folder
folder, go = sys.argv[1:3]
import os
sys.stdout.write("ready\\n"); sys.stdout.flush()
sys.stdin.readline()
try:
    with lock_folder(folder):
        sys.stdout.write("won\\n"); sys.stdout.flush()
        sys.stdin.readline()
except FolderLocked as error:
    sys.stdout.write("refused\\n"); sys.stdout.flush()
    sys.stdin.readline()
"""


def starter(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", STARTER, str(folder), "go"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def press(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def contest(folder: Path, count: int) -> list[str]:
    """What each of many processes that start at once is told."""
    processes = [starter(folder) for _ in range(count)]
    try:
        assert [answer(process) for process in processes] == ["ready"] * count
        for process in processes:
            press(process)
        return [answer(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def write_lock(folder: Path, holder: Holder, age_s: float = 0.0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / LOCK
    file.write_text(json.dumps(asdict(holder)))
    then = time.time() - age_s
    os.utime(file, (then, then))
    return file


def dead_here() -> Holder:
    """A holder on this machine whose process has ended."""
    return replace(Holder.here(), pid=os.getpid(), started="1")


def elsewhere() -> Holder:
    return replace(Holder.here(), host="node-7", boot="another")


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.02)
    monkeypatch.setattr(lock, "SILENT_S", 0.4)


def test_a_second_process_is_refused_and_told_who_holds_the_folder(tmp_path: Path) -> None:
    first = starter(tmp_path)
    try:
        answer(first)
        press(first)
        assert answer(first) == "won"
        with pytest.raises(FolderLocked) as caught, lock_folder(tmp_path):
            pass
    finally:
        first.kill()
        first.communicate()
    said = str(caught.value)
    assert f"process {first.pid} on {Holder.here().host}, since 20" in said
    assert "nothing was changed" in said
    with lock_folder(tmp_path):  # its process was killed: the lock is stale
        assert (tmp_path / LOCK).is_file()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stale", [False, True])
def test_of_many_that_start_at_once_one_wins(tmp_path: Path, stale: bool) -> None:
    if stale:
        write_lock(tmp_path, dead_here())
    answers = contest(tmp_path, 8)
    assert sorted(answers) == ["refused"] * 7 + ["won"]


def test_a_process_enters_its_own_lock_again(tmp_path: Path) -> None:
    with lock_folder(tmp_path / "run"):
        with lock_folder(tmp_path / "run"):
            pass
        assert (tmp_path / "run" / LOCK).is_file()
    assert not list(tmp_path.iterdir())  # a folder made for the lock alone goes with it


def test_a_number_used_again_by_another_process_is_not_the_holder(tmp_path: Path) -> None:
    write_lock(tmp_path, dead_here())
    with lock_folder(tmp_path):
        record = json.loads((tmp_path / LOCK).read_text())
        assert record["started"] == Holder.here().started


def test_a_holder_on_another_machine_is_live_while_it_touches_its_lock(
    tmp_path: Path, fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_lock(tmp_path, elsewhere())
    slept = time.sleep

    def touched_meanwhile(seconds: float) -> None:
        slept(seconds)
        os.utime(file)

    monkeypatch.setattr(time, "sleep", touched_meanwhile)
    with pytest.raises(FolderLocked, match="on node-7"), lock_folder(tmp_path):
        pass


@pytest.mark.parametrize("age_s", [0.0, 3600.0, -3600.0])
def test_the_lock_of_a_machine_that_crashed_is_taken_over(
    tmp_path: Path, fast: None, caplog: pytest.LogCaptureFixture, age_s: float
) -> None:
    write_lock(tmp_path, elsewhere(), age_s)
    with caplog.at_level(logging.WARNING), lock_folder(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert "is stale and was removed" in caplog.text


def test_the_same_number_in_another_container_is_another_process(
    tmp_path: Path, fast: None
) -> None:
    write_lock(tmp_path, replace(Holder.here(), process_space="pid:[1]"), age_s=9.0)
    with lock_folder(tmp_path):
        pass


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b"\x80\x04", b'{"token": "../../x"}', b"[" * 100_000],
    ids=["empty", "torn", "list", "table", "binary", "path", "deep"],
)
def test_a_lock_that_names_no_holder_is_judged_by_its_age(
    tmp_path: Path, fast: None, content: bytes
) -> None:
    (tmp_path / LOCK).write_bytes(content)
    with lock_folder(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_starter_killed_while_it_took_over_stops_nothing(tmp_path: Path) -> None:
    dead = dead_here()
    file = write_lock(tmp_path, dead)
    rival = replace(dead_here(), token="c0ffee")
    file.with_name(f"{LOCK}-{dead.token}.next").write_text(json.dumps(asdict(rival)))
    file.with_name(f"{LOCK}-c0ffee").write_text(json.dumps(asdict(rival)))
    assert sorted(contest(tmp_path, 4)) == ["refused"] * 3 + ["won"]
    with lock_folder(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_without_hard_links_one_wins_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with lock_folder(tmp_path):
        other = starter(tmp_path)
        answer(other)
        press(other)
        assert answer(other) == "refused"
        other.kill()
        other.communicate()
    write_lock(tmp_path, dead_here())
    with lock_folder(tmp_path):
        pass


def test_a_process_that_was_taken_for_dead_writes_nothing_more(tmp_path: Path, fast: None) -> None:
    from hone.tracking import RunFolder, Tracking
    from hone.trainer.ppo.checkpoint import atomic_folder

    with lock_folder(tmp_path):
        tracking = Tracking("p", "e", [], {}, run_folder=tmp_path)
        tracking.log({"a": 1}, 1)
        write_lock(tmp_path, elsewhere())
        deadline = time.monotonic() + 20
        while not lock._held[tmp_path / LOCK].is_lost and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(LockLost, match="taken over"):
            require_lock(tmp_path)
        with pytest.raises(LockLost):
            tracking.log({"a": 1}, 2)
        with pytest.raises(LockLost), atomic_folder(RunFolder(tmp_path), 1):
            pass
    assert (tmp_path / LOCK).is_file()  # it is the other's


def test_a_lock_is_touched_while_it_is_held(tmp_path: Path, fast: None) -> None:
    with lock_folder(tmp_path):
        os.utime(tmp_path / LOCK, (1, 1))
        deadline = time.monotonic() + 20
        while (tmp_path / LOCK).stat().st_mtime == 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert time.time() - (tmp_path / LOCK).stat().st_mtime < 60


def test_a_forked_child_neither_holds_nor_releases(tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        child = os.fork()
        if child == 0:
            require_lock(tmp_path)
            os._exit(0 if not lock._held else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert (tmp_path / LOCK).is_file()


def test_a_target_is_locked_beside_it(tmp_path: Path) -> None:
    with lock_target(tmp_path / "out.parquet"):
        assert [p.name for p in tmp_path.iterdir()] == [".out.parquet.lock"]
