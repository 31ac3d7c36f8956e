from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hone.rewards import pool as pool_module
from hone.rewards.failures import Failed
from hone.rewards.pool import DeadlinePool, PoolError

WORK = r"""
import os, signal, subprocess, sys, time

def make(base=0):
    def work(action, value=None):
        if action == "add":
            return base + value
        if action == "pid":
            return os.getpid()
        if action == "hang":
            if value:
                open(value, "w").close()
            time.sleep(3600)
        if action == "spin":
            import re
            re.match(r"(a+)+$", "a" * 64 + "b")
        if action == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
            program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
            program.terminate()
            read_end, write_end = os.pipe()
            fork = os.fork()
            if not fork:
                os.write(write_end, b"started")
                time.sleep(3600)
            os.read(read_end, 7)
            os.kill(fork, signal.SIGTERM)
            return [program.wait(), -os.WTERMSIG(os.waitpid(fork, 0)[1])]
        if action == "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
            open(value, "w").write(str(child.pid))
            time.sleep(3600)
        if action == "raise":
            raise KeyError(value)
        if action == "exit":
            os._exit(7)
        if action == "record pid":  # the first call hangs, the later ones do not
            with open(value, "a") as file:
                file.write(f"{os.getpid()}\n")
            while open(value).read().count("\n") == 1:
                time.sleep(0.01)
            return "scored"
        if action == "kill":
            with open(value, "a") as file:
                file.write(f"{os.getpid()}\n")
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "segfault":
            import ctypes
            ctypes.string_at(0)
        if action == "closerange":
            os.closerange(3, 1000)
        if action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if action == "memory":
            held = bytearray(b"x") * (3 << 29)
            os._exit(len(held) & 1)
        if action == "half":
            os.write(int(sys.argv[1]), (1000).to_bytes(4, "big") + b"half")
            time.sleep(3600)
        if action == "unsendable":
            return lambda: None
        if action == "refusing":
            return Refusing()
        if action == "unreadable":
            return Unreadable()
    return work

class Unreadable:
    def __setstate__(self, state):
        raise ValueError("not to be read")
    def __getstate__(self):
        return {"x": 1}

class Refusing:
    def __reduce__(self):
        raise RuntimeError("not to be pickled")

def make_badly():
    raise RuntimeError("no licence")

def die_starting():
    os._exit(9)

def killed_starting(file, times):
    with open(file, "a") as starts:
        starts.write("x")
    if os.path.getsize(file) <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return make()

def hanging_start(file):
    if not os.path.exists(file):
        open(file, "w").close()
        time.sleep(3600)
    return make()
"""


@pytest.fixture(scope="module", autouse=True)
def _importable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("pool_work")
    (folder / "pool_work.py").write_text(WORK)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture
def make_pool() -> Iterator[Callable[..., DeadlinePool]]:
    pools: list[DeadlinePool] = []

    def make(name: str = "make", size: int = 1, **keywords: Any) -> DeadlinePool:
        pools.append(DeadlinePool(f"pool_work:{name}", keywords, size))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


DEADLINES_S = (2.0, 10.0, 50.0)  # the first is enough, unless the machine stands still meanwhile


def add(value: int) -> dict[str, Any]:
    return {"action": "add", "value": value}


def interrupt_when(file: Path) -> None:
    """Sends this process a SIGINT, as Ctrl-C does, once the file exists."""

    def wait_and_interrupt() -> None:
        while not file.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait_and_interrupt, daemon=True).start()


def has_ended(pid: int) -> bool:
    for _ in range(1200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_files_of_the_working_directory_hide_no_modules(
    make_pool: Callable[..., DeadlinePool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError('not the standard module')")
    monkeypatch.chdir(tmp_path)
    assert make_pool().run([{"action": "add", "value": 1}], 30.0) == [1]


def test_results_are_in_the_order_of_the_jobs(make_pool: Callable[..., DeadlinePool]) -> None:
    pool = make_pool(size=2, base=100)
    assert pool.run([add(i) for i in range(50)], 60) == [100 + i for i in range(50)]
    assert pool.run([], 60) == []


def test_processes_are_reused_between_runs(make_pool: Callable[..., DeadlinePool]) -> None:
    pool = make_pool()
    assert pool.run([{"action": "pid"}], 60) == pool.run([{"action": "pid"}], 60)


@pytest.mark.parametrize("action", ["hang", "spin"])
def test_a_late_call_is_killed_and_the_others_keep_their_results(
    make_pool: Callable[..., DeadlinePool], action: str
) -> None:
    pool = make_pool()
    [before] = pool.run([{"action": "pid"}], 60)
    for timeout_s in DEADLINES_S:
        first, late, last = pool.run([add(1), {"action": action}, add(2)], timeout_s)
        if (first, last) == (1, 2):
            break
    assert (first, last) == (1, 2)
    assert isinstance(late, Failed)
    assert late.reason == "timeout"
    assert has_ended(before)
    [after] = pool.run([{"action": "pid"}], 60)
    assert after != before


def test_sigterm_ends_children_of_a_call_but_not_the_worker(
    make_pool: Callable[..., DeadlinePool],
) -> None:
    pool = make_pool()
    pids = pool.run([{"action": "pid"}], 60)
    assert pool.run([{"action": "sigterm"}], 60) == [[-signal.SIGTERM, -signal.SIGTERM]]
    assert pool.run([{"action": "pid"}], 60) == pids
    pool.close()
    assert has_ended(pids[0])


def test_children_of_a_killed_call_die_with_it(
    make_pool: Callable[..., DeadlinePool], tmp_path: Path
) -> None:
    file = tmp_path / "pid"
    pool = make_pool()
    for timeout_s in DEADLINES_S:
        [result] = pool.run([{"action": "child", "value": str(file)}], timeout_s)
        assert result.reason == "timeout"
        if file.exists() and file.read_text():
            break
    assert has_ended(int(file.read_text()))


def test_a_failed_call_is_a_failure_and_does_not_end_the_pool(
    make_pool: Callable[..., DeadlinePool],
) -> None:
    pool = make_pool()
    jobs = [{"action": "raise", "value": "x"}, {"action": "exit"}, {"action": "unsendable"}, add(5)]
    exception, crash, unsendable, result, refusing = pool.run([*jobs, {"action": "refusing"}], 60)
    assert (exception.reason, exception.detail) == ("exception", "KeyError: 'x'")
    assert crash.reason == "crash"
    assert "code 7" in crash.detail
    assert unsendable.reason == refusing.reason == "bad_return"
    assert result == 5


class Unreadable:
    """Can be pickled, but neither process can read it."""

    def __setstate__(self, state: Any) -> None:
        raise ValueError("not to be read")

    def __getstate__(self) -> Any:
        return {"x": 1}


class Unsendable:
    def __reduce__(self) -> Any:
        raise OSError("a closed file")


def test_a_row_that_cannot_be_sent_fails_alone(make_pool: Callable[..., DeadlinePool]) -> None:
    pool = make_pool(size=1)
    [pid] = pool.run([{"action": "pid"}], 60)
    values = [Unsendable(), lambda: None, Unreadable()]
    jobs = [{"action": "add", "value": value} for value in values]
    *failures, result, new_pid = pool.run([*jobs, add(5), {"action": "pid"}], 60)
    assert [failed.reason for failed in failures] == ["bad_row"] * 3
    assert "OSError: a closed file" in failures[0].detail
    assert (result, new_pid) == (5, pid)


def test_a_row_whose_process_is_killed_from_outside_is_scored_once_more(
    make_pool: Callable[..., DeadlinePool], tmp_path: Path
) -> None:
    file = tmp_path / "pids"

    def kill_when_scoring() -> None:
        while not (file.exists() and file.read_text().endswith("\n")):
            time.sleep(0.01)
        os.kill(int(file.read_text()), signal.SIGKILL)

    threading.Thread(target=kill_when_scoring, daemon=True).start()
    scores = make_pool().run([{"action": "record pid", "value": str(file)}, add(1)], 60)
    assert scores == ["scored", 1]
    first, second = map(int, file.read_text().split())
    assert first != second


def test_a_row_whose_process_is_killed_twice_is_one_failure(
    make_pool: Callable[..., DeadlinePool], tmp_path: Path
) -> None:
    file = tmp_path / "pids"
    killed, result = make_pool().run([{"action": "kill", "value": str(file)}, add(1)], 60)
    assert (killed.reason, result) == ("crash", 1)
    assert "code -9" in killed.detail
    assert len(file.read_text().split()) == 2


@pytest.mark.slow
def test_hostile_scorers_are_failures_and_leave_no_process(
    make_pool: Callable[..., DeadlinePool], tmp_path: Path
) -> None:
    pool, pid_file, child_file = make_pool(size=2), tmp_path / "pids", tmp_path / "child"
    hostile = [
        {"action": "segfault"},
        {"action": "exit"},
        {"action": "kill", "value": str(pid_file)},
        {"action": "closerange"},
        {"action": "child", "value": str(child_file)},
        {"action": "stop"},
        {"action": "memory"},
        {"action": "raise", "value": "x"},
    ]
    for _ in range(6):
        *failures, result = pool.run([*hostile, add(5)], 10)
        reasons = [failed.reason for failed in failures]
        crash, late = ["crash"], ["timeout"]
        assert reasons == [*crash * 4, *late * 2, *crash, "exception"]
        assert result == 5
        assert has_ended(int(child_file.read_text()))
    pids = [worker.process.pid for worker in pool._workers]
    pool.close()
    assert all(has_ended(pid) for pid in pids)


PARENT = """
import sys
from hone.rewards.pool import DeadlinePool
sys.path.insert(0, sys.argv[1])
DeadlinePool("pool_work:make", {}, 1).run([{"action": "child", "value": sys.argv[2]}], 3600)
"""


def test_a_call_and_its_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "pool_work.py").write_text(WORK)
    pid_file = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), str(pid_file)])
    while not (pid_file.exists() and pid_file.read_text()):
        assert parent.poll() is None
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    assert has_ended(int(pid_file.read_text()))


def test_a_tensor_is_sent_without_shared_memory(make_pool: Callable[..., DeadlinePool]) -> None:
    import torch

    [total] = make_pool().run([{"action": "add", "value": torch.ones(2)}], 60)
    assert total.tolist() == [1.0, 1.0]


def test_an_answer_that_cannot_be_read_fails_alone(make_pool: Callable[..., DeadlinePool]) -> None:
    failed, result = make_pool().run([{"action": "unreadable"}, add(5)], 60)
    assert (failed.reason, result) == ("bad_return", 5)
    assert "not to be read" in failed.detail


def test_a_worker_that_died_while_idle_is_replaced(make_pool: Callable[..., DeadlinePool]) -> None:
    pool = make_pool()
    [pid] = pool.run([{"action": "pid"}], 60)
    os.kill(pid, signal.SIGKILL)
    assert has_ended(pid)
    assert pool.run([add(1), add(2)], 60)[1] == 2


@pytest.mark.parametrize(
    ("name", "message"), [("make_badly", "RuntimeError: no licence"), ("die_starting", "code 9")]
)
def test_a_worker_that_cannot_start_is_an_error_and_not_a_score(
    make_pool: Callable[..., DeadlinePool], name: str, message: str
) -> None:
    with pytest.raises(PoolError, match=message):
        make_pool(name).run([add(1)], 60)


def test_a_worker_killed_while_it_starts_is_retried(
    make_pool: Callable[..., DeadlinePool], tmp_path: Path
) -> None:
    pool = make_pool("killed_starting", file=str(tmp_path / "starts"), times=2)
    assert pool.run([add(1), add(2)], 60) == [1, 2]


def test_a_worker_killed_at_every_start_is_an_error(
    make_pool: Callable[..., DeadlinePool], tmp_path: Path
) -> None:
    file = tmp_path / "starts"
    with pytest.raises(PoolError, match=r"code -9 .*killed: is there enough memory.* 2 before it"):
        make_pool("killed_starting", file=str(file), times=9).run([add(1)], 60)
    assert len(file.read_text()) == 3


def test_a_worker_that_stops_within_an_answer_is_a_crash(
    make_pool: Callable[..., DeadlinePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only half a message arrives; reading it has a time limit."""
    monkeypatch.setattr(pool_module, "MESSAGE_TIMEOUT_S", 1.0)
    half, whole = make_pool().run([{"action": "half"}, add(2)], 60)
    assert half.reason == "crash"
    assert whole == 2


def test_a_closed_pool_raises_and_leaves_no_process(
    make_pool: Callable[..., DeadlinePool],
) -> None:
    pool = make_pool()
    [pid] = pool.run([{"action": "pid"}], 60)
    pool.close()
    pool.close()
    assert has_ended(pid)
    with pytest.raises(PoolError, match="closed"):
        pool.run([add(1)], 60)


def test_an_interrupted_run_leaves_no_stale_answer(
    make_pool: Callable[..., DeadlinePool], tmp_path: Path
) -> None:
    pool, file = make_pool(), tmp_path / "hangs"
    [pid] = pool.run([{"action": "pid"}], 60)
    interrupt_when(file)
    with pytest.raises(KeyboardInterrupt):
        pool.run([{"action": "hang", "value": str(file)}, add(1)], 600)
    assert has_ended(pid)
    assert pool.run([add(2)], 60) == [2]


def test_an_interrupt_while_a_worker_starts_waits_for_no_answer(
    make_pool: Callable[..., DeadlinePool], tmp_path: Path
) -> None:
    file = tmp_path / "starts"
    pool = make_pool("hanging_start", file=str(file))
    interrupt_when(file)
    with pytest.raises(KeyboardInterrupt):
        pool.run([{"action": "hang"}], 600)
    assert pool.run([add(2)], 60) == [2]


def test_threads_may_share_a_pool(make_pool: Callable[..., DeadlinePool]) -> None:
    pool = make_pool(size=2)
    results: dict[int, list[Any]] = {}

    def work(start: int) -> None:
        results[start] = pool.run([add(start + i) for i in range(5)], 60)

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == {start: [start + i for i in range(5)] for start in (0, 100, 200)}


def test_a_pool_needs_a_process() -> None:
    with pytest.raises(ValueError, match="got 0"):
        DeadlinePool("pool_work:make", {}, 0)


@pytest.mark.slow
def test_a_hanging_worker_does_not_outlive_a_killed_owner(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    script = (
        "import os, sys, threading; from hone.rewards.pool import DeadlinePool\n"
        f"sys.path.insert(0, {sys.path[0]!r})\n"
        "pool = DeadlinePool('pool_work:make', {}, 1)\n"
        "[pid] = pool.run([{'action': 'pid'}], 60)\n"
        f"open({str(file)!r}, 'w').write(str(pid))\n"
        "threading.Timer(0.5, lambda: os.kill(os.getpid(), 9)).start()\n"
        "pool.run([{'action': 'spin'}], 1.0)\n"
    )
    process = subprocess.run([sys.executable, "-c", script])
    assert process.returncode == -signal.SIGKILL
    pid = int(file.read_text())
    assert has_ended(pid)
