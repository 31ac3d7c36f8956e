"""The lock of a folder has one live holder, on this machine or another; a dead holder loses the lock."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hone.tracking import lock
from hone.tracking.lock import (
    LOCK_NAME,
    FolderLocked,
    Holder,
    LockLost,
    lock_folder,
    lock_target,
    raise_if_lock_lost,
)

STARTER = """
import sys, time
from hone.tracking.lock import FolderLocked, lock_folder
folder = sys.argv[1]
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
    command = [sys.executable, "-c", STARTER, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def send_newline(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def contest(folder: Path, count: int) -> list[str]:
    """Starts many processes at once and returns the answer of each."""
    processes = [starter(folder) for _ in range(count)]
    try:
        assert [answer(process) for process in processes] == ["ready"] * count
        for process in processes:
            send_newline(process)
        return [answer(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def write_lock(folder: Path, holder: Holder, age_s: float = 0.0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / LOCK_NAME
    file.write_text(json.dumps(asdict(holder)))
    mtime = time.time() - age_s
    os.utime(file, (mtime, mtime))
    return file


def dead_local_holder() -> Holder:
    """A holder on this machine whose process has ended."""
    return replace(Holder.of_this_process(), pid=os.getpid(), started="1")


def remote_holder() -> Holder:
    return replace(Holder.of_this_process(), host="node-7", boot="another")


@pytest.fixture
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(lock, "DEAD_AFTER_S", 0.4)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock of the lock's waits, which end at once; file times are real."""
    fake = SimpleNamespace(now=0.0, strftime=time.strftime, gmtime=time.gmtime)
    fake.monotonic = lambda: fake.now
    fake.sleep = lambda seconds: setattr(fake, "now", fake.now + seconds)
    monkeypatch.setattr(lock, "time", fake)
    return fake


def test_a_second_process_is_refused_with_the_name_of_the_holder(tmp_path: Path) -> None:
    first = starter(tmp_path)
    try:
        answer(first)
        send_newline(first)
        assert answer(first) == "won"
        with pytest.raises(FolderLocked) as caught, lock_folder(tmp_path):
            pass
    finally:
        first.kill()
        first.communicate()
    message = str(caught.value)
    assert f"process {first.pid} on {Holder.of_this_process().host}, since 20" in message
    assert "nothing was changed" in message
    with lock_folder(tmp_path):  # its process was killed, so the lock is stale
        assert (tmp_path / LOCK_NAME).is_file()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stale", [False, True])
def test_one_of_many_concurrent_processes_gets_the_lock(tmp_path: Path, stale: bool) -> None:
    if stale:
        write_lock(tmp_path, dead_local_holder())
    answers = contest(tmp_path, 8)
    assert sorted(answers) == ["refused"] * 7 + ["won"]


def test_the_lock_is_reentrant(tmp_path: Path) -> None:
    with lock_folder(tmp_path / "run"):
        with lock_folder(tmp_path / "run"):
            pass
        assert (tmp_path / "run" / LOCK_NAME).is_file()
    assert not list(
        tmp_path.iterdir()
    )  # the folder was created for the lock and is removed with it


def test_a_reused_pid_is_not_the_holder(tmp_path: Path) -> None:
    write_lock(tmp_path, dead_local_holder())
    with lock_folder(tmp_path):
        record = json.loads((tmp_path / LOCK_NAME).read_text())
        assert record["started"] == Holder.of_this_process().started


def test_a_holder_on_another_machine_is_live_while_it_touches_its_lock(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    file = write_lock(tmp_path, remote_holder())
    clock.sleep = lambda _: os.utime(file)
    with pytest.raises(FolderLocked, match="on node-7"), lock_folder(tmp_path):
        pass


@pytest.mark.parametrize("age_s", [0.0, 3600.0, -3600.0])
def test_the_lock_of_a_machine_that_crashed_is_taken_over(
    tmp_path: Path, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture, age_s: float
) -> None:
    write_lock(tmp_path, remote_holder(), age_s)
    with caplog.at_level(logging.WARNING), lock_folder(tmp_path):
        assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()
    assert "is stale and was removed" in caplog.text
    assert ("last seen" in caplog.text) == (age_s < 1)  # no wait for a lock that is an hour old
    assert (clock.now > lock.DEAD_AFTER_S) == (age_s < 1)


def test_the_same_pid_in_another_container_is_another_process(
    tmp_path: Path, short_intervals: None
) -> None:
    write_lock(tmp_path, replace(Holder.of_this_process(), process_space="pid:[1]"), age_s=9.0)
    with lock_folder(tmp_path):
        pass


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b"\x80\x04", b'{"token": "../../x"}', b"[" * 100_000],
    ids=["empty", "incomplete", "list", "object", "binary", "path", "deep"],
)
def test_an_invalid_lock_file_is_stale_after_a_while(
    tmp_path: Path, short_intervals: None, content: bytes
) -> None:
    (tmp_path / LOCK_NAME).write_bytes(content)
    with lock_folder(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_process_killed_during_a_takeover_blocks_no_process(tmp_path: Path) -> None:
    dead = dead_local_holder()
    file = write_lock(tmp_path, dead)
    rival = replace(dead_local_holder(), token="c0ffee")
    file.with_name(f"{LOCK_NAME}-{dead.token}.next").write_text(json.dumps(asdict(rival)))
    file.with_name(f"{LOCK_NAME}-c0ffee").write_text(json.dumps(asdict(rival)))
    assert sorted(contest(tmp_path, 4)) == ["refused"] * 3 + ["won"]
    with lock_folder(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_without_hard_links_one_process_gets_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with lock_folder(tmp_path):
        other = starter(tmp_path)
        answer(other)
        send_newline(other)
        assert answer(other) == "refused"
        other.kill()
        other.communicate()
    write_lock(tmp_path, dead_local_holder())
    with lock_folder(tmp_path):
        pass


def message_of_loss(folder: Path) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            raise_if_lock_lost(folder)
        except LockLost as error:
            return str(error)
        time.sleep(0.01)
    return "the lock was not lost"


def test_a_lock_file_deleted_by_hand_is_named_as_the_reason(
    tmp_path: Path, short_intervals: None
) -> None:
    file = tmp_path / LOCK_NAME
    with lock_folder(tmp_path):
        file.unlink()
        message = message_of_loss(tmp_path)
    assert f"the lock file {file} was deleted; this process writes nothing more" in message


def test_a_run_that_follows_a_deletion_of_the_lock_file_is_named(
    tmp_path: Path, short_intervals: None
) -> None:
    file = tmp_path / LOCK_NAME
    other = replace(Holder.of_this_process(), pid=os.getppid())
    with lock_folder(tmp_path):
        write_lock(tmp_path, other)
        message = message_of_loss(tmp_path)
    assert f"process {other.pid} on" in message
    assert f"taken over the lock, because the lock file {file} was deleted" in message


def test_a_process_that_lost_its_lock_writes_nothing_more(
    tmp_path: Path, short_intervals: None
) -> None:
    from hone.tracking import RunFolder, Tracking
    from hone.trainer.ppo.checkpoint import atomic_folder

    with lock_folder(tmp_path):
        tracking = Tracking("p", "e", [], {}, run_folder=tmp_path)
        tracking.log({"a": 1}, 1)
        write_lock(tmp_path, remote_holder())
        message = message_of_loss(tmp_path)
        assert "on node-7" in message
        assert "did not run for" in message
        with pytest.raises(LockLost):
            tracking.log({"a": 1}, 2)
        with pytest.raises(LockLost), atomic_folder(RunFolder(tmp_path), 1):
            pass
    assert (tmp_path / LOCK_NAME).is_file()  # it belongs to the other process


def test_the_holder_touches_the_lock_file(tmp_path: Path, short_intervals: None) -> None:
    with lock_folder(tmp_path):
        os.utime(tmp_path / LOCK_NAME, (1, 1))
        deadline = time.monotonic() + 60
        while (tmp_path / LOCK_NAME).stat().st_mtime == 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert time.time() - (tmp_path / LOCK_NAME).stat().st_mtime < 60


def test_a_forked_child_does_not_hold_or_release_the_lock(tmp_path: Path) -> None:
    with lock_folder(tmp_path) as parent_lock:
        child = os.fork()
        if child == 0:
            raise_if_lock_lost(tmp_path)
            is_held = bool(lock._locks)
            parent_lock._release()
            os._exit(is_held)
        assert os.waitpid(child, 0)[1] == 0
        assert (tmp_path / LOCK_NAME).is_file()


def test_the_lock_of_a_target_is_beside_it(tmp_path: Path) -> None:
    with lock_target(tmp_path / "out.parquet"):
        assert [p.name for p in tmp_path.iterdir()] == [".out.parquet.lock"]


def test_threads_of_a_process_share_a_lock(tmp_path: Path) -> None:
    entered, errors = threading.Barrier(4), []

    def use_folder() -> None:
        try:
            with lock_folder(tmp_path):
                entered.wait(60)
        except (FolderLocked, threading.BrokenBarrierError) as error:
            errors.append(error)
            entered.abort()

    threads = [threading.Thread(target=use_folder) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert list(tmp_path.iterdir()) == []
