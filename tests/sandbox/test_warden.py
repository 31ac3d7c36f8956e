"""Nothing stays behind: no process, no file, no cgroup, whoever dies first."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hone.sandbox import Job, SandboxError, Status, cgroups, client, run_many, run_python
from hone.sandbox.client import run_job
from hone.sandbox.layers import DEFAULT_MINIMUM, plan_for
from hone.sandbox.plan import Order

from .attacks import processes_that_mention

HOSTILE: dict[str, dict[str, Any]] = {
    "fork bomb": {"code": "import os\nwhile True: os.fork()", "timeout_s": 0.2, "processes": 8},
    "memory bomb": {"code": "x = [bytearray(1 << 20) for _ in range(999)]", "memory_mb": 64},
    "endless loop": {"code": "while True: pass", "timeout_s": 0.2},
    "output": {"code": "while True: print('x' * 9999)", "output_bytes": 1 << 16},
    "write": {"code": "open('/usr/x', 'w')"},
    "fill the disk": {"code": "open('x', 'wb').write(b'x' * (9 << 20))", "disk_mb": 4},
    "secret": {"code": "print(open('/etc/passwd').read())"},
    "socket": {"code": "import socket; socket.create_connection(('127.0.0.1', 22), 1)"},
    "signal": {"code": "import os; os.kill(-1, 9); os.kill(os.getppid(), 9)"},
    "daemon": {
        "code": "import os, time\nif os.fork() == 0:\n os.setsid()\n os.fork() or time.sleep(999)"
    },
    "crash": {"code": "import os; os.abort()"},
    "leave a mess": {
        "code": "import os, tempfile\nfor i in range(50): os.mkdir(f'd{i}', 0); tempfile.mkstemp()"
    },
}
BURNS = ("fork bomb", "endless loop")  # these use a whole core for their wall time


def hostile_jobs(count: int, burning_every: int) -> list[dict[str, Any]]:
    quick = [job for name, job in HOSTILE.items() if name not in BURNS]
    burning = [HOSTILE[name] for name in BURNS]
    return [
        burning[(i // burning_every) % len(burning)]
        if i % burning_every == 0
        else quick[i % len(quick)]
        for i in range(count)
    ]


def members(session: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a process may end while it is looked at
            if os.getsid(int(entry.name)) == session and (entry / "exe").exists():
                found.append(int(entry.name))
    return found


def descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):  # a process may end while it is looked at
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def remains(warden: int) -> list[str]:
    """Files and groups that a warden's boxes left on this machine."""
    parents, _ = cgroups.find_parents()
    places = [*(parents.unique if parents else ()), "/tmp"]
    names = [str(p) for place in places for p in Path(place).glob(f"hone-*{warden}-*")]
    return names + [name for name in ("/usr/x", "/box") if os.path.exists(name)]


def warden_pid() -> int:
    run_python("pass")
    process = client._warden._process
    assert process is not None
    return process.pid


def wait_until(condition: Any, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def attack(count: int, burning_every: int) -> None:
    plan_for(DEFAULT_MINIMUM)  # its probe is a run too
    client.close()
    pid = warden_pid()  # a first run leaves no spare behind: what is open now is the warden's own
    open_before = descriptors(pid)
    jobs = [Job(**job) for job in hostile_jobs(count, burning_every)]
    seen = Counter(result.status for result in run_many(jobs, max_concurrent=4))
    assert set(seen) >= {Status.TIMEOUT, Status.MEMORY, Status.OUTPUT, Status.ERROR}, seen
    assert warden_pid() == pid
    assert wait_until(lambda: descendants(pid) == [])
    assert wait_until(lambda: remains(pid) == [])
    assert wait_until(lambda: descriptors(pid) == open_before)
    assert run_python("print('still well')").stdout == "still well\n"


def test_120_hostile_runs_leave_nothing_behind(bwrap: None) -> None:
    attack(120, burning_every=12)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_storm_of_hostile_runs_leaves_nothing_behind(bwrap: None) -> None:
    attack(int(os.environ.get("HONE_HOSTILE_RUNS", "1000")), burning_every=25)


@pytest.mark.slow
def test_120_hostile_runs_as_uid_65534_leave_nothing_behind(nobody: Any) -> None:
    nobody.ask({"code": "pass"})
    pid = nobody.ask({"ask": "facts"})["warden"]
    question = {"ask": "many", "max_concurrent": 4, "jobs": hostile_jobs(120, burning_every=12)}
    assert set(nobody.ask(question)) >= {"timeout", "memory", "output", "error"}
    assert wait_until(lambda: descendants(pid) == [])
    assert wait_until(lambda: remains(pid) == [])


def test_a_killed_warden_takes_its_boxes_down_and_is_replaced(bwrap: None) -> None:
    client.close()
    pid = warden_pid()
    raised: list[Exception] = []

    def wait_for_ever() -> None:
        try:
            # With arguments: no spare is built for it, so the third process below is the program.
            run_python("import time; time.sleep(1000)", timeout_s=50.0, argv=["x"])
        except SandboxError as error:
            raised.append(error)

    thread = threading.Thread(target=wait_for_ever)
    thread.start()
    assert wait_until(lambda: len(descendants(pid)) >= 3)
    boxed = descendants(pid)
    os.kill(pid, signal.SIGKILL)
    thread.join(30)
    assert "warden ended" in str(raised[0])
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{child}/exe") for child in boxed))
    assert run_python("print(1)").stdout == "1\n"
    assert warden_pid() != pid
    assert wait_until(lambda: remains(pid) == [])  # the next warden sweeps


def test_a_warden_killed_while_a_box_is_being_built_leaves_nothing(bwrap: None) -> None:
    token = uuid.uuid4().hex
    for number in range(6):
        pid = warden_pid()
        assert wait_until(lambda warden=pid: descendants(warden) == [])
        outcomes: list[str] = []

        def run(outcomes: list[str] = outcomes) -> None:
            try:
                code = "import time; time.sleep(0.5); print('warden replaced')"
                outcomes.append(run_python(code, timeout_s=50.0, argv=[token]).stdout)
            except SandboxError as error:  # the program had started
                outcomes.append(str(error))

        thread = threading.Thread(target=run)
        thread.start()
        assert wait_until(lambda warden=pid: descendants(warden) != [])
        time.sleep(0.004 * number)
        os.kill(pid, signal.SIGKILL)
        thread.join(60)
        assert "warden" in outcomes[0]
        assert wait_until(lambda warden=pid: members(warden) == [])
    assert wait_until(lambda: processes_that_mention(token) == [])


@pytest.mark.parametrize(
    "limits",
    [
        {"timeout_s": 1e308},
        {"cpu_s": 2**70},
        {"memory_mb": 2**70},
        {"memory_mb": "much"},
        {"processes": -(2**70)},
        {"disk_mb": 1.5},
        {"open_files": None},
        {"files": {"\ud800": ""}},
        {"argv": ("\ud800",)},
        {"argv": 5},
        {"plan": None},
    ],
)
def test_no_order_takes_the_warden_and_other_runs_with_it(
    bwrap: None, limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orders that Job would refuse, sent all the same."""
    pid = warden_pid()
    others: list[str] = []
    code = "import time; time.sleep(0.3); print(1)"
    other = threading.Thread(target=lambda: others.append(run_python(code).stdout))
    other.start()
    order = Order.of(Job("pass"), plan_for(DEFAULT_MINIMUM))
    for name, value in limits.items():
        object.__setattr__(order if name == "plan" else order.job, name, value)
    with monkeypatch.context() as patched:
        patched.setattr(Order, "of", lambda *_, **__: order)
        with contextlib.suppress(SandboxError):
            run_job(Job("pass", timeout_s=20.0), plan_for(DEFAULT_MINIMUM))
    other.join(60)
    assert others == ["1\n"]
    assert warden_pid() == pid


def test_a_warden_killed_while_it_starts_is_tried_again(
    bwrap: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(DEFAULT_MINIMUM)
    mark = tmp_path / "again"
    fragile = f"import os\nif not os.path.exists({str(mark)!r}):\n"
    fragile += f"    open({str(mark)!r}, 'w').close()\n    os.kill(os.getpid(), 9)\n"
    monkeypatch.setattr(client, "_BOOT", fragile + client._BOOT)
    client.close()
    assert run_job(Job("print(1)"), plan).stdout == "1\n"
    assert mark.exists()
    monkeypatch.setattr(client, "_BOOT", "import os; os.kill(os.getpid(), 9)")
    client.close()
    with pytest.raises(SandboxError, match="warden"):
        run_job(Job("print(1)"), plan)
    monkeypatch.undo()
    assert run_job(Job("print(1)"), plan).stdout == "1\n"


def test_a_warden_killed_before_the_program_starts_is_tried_again(
    bwrap: None, tmp_path: Path
) -> None:
    slow, mark = tmp_path / "bwrap", tmp_path / "again"
    real = plan_for(DEFAULT_MINIMUM).bwrap
    slow.write_text(f'#!/bin/sh\nif test -e {mark}; then exec {real} "$@"; fi\nexec sleep 1000\n')
    for path in (slow, tmp_path, *list(tmp_path.parents)[:2]):
        path.chmod(0o755)
    plan = dataclasses.replace(plan_for(DEFAULT_MINIMUM), bwrap=str(slow))
    pid = warden_pid()
    results: list[str] = []
    thread = threading.Thread(
        target=lambda: results.append(run_job(Job("print(1)"), plan).stdout), daemon=True
    )
    thread.start()
    assert wait_until(lambda: {*members(pid)} & {*processes_that_mention("sleep")})
    mark.touch()
    os.kill(pid, signal.SIGKILL)
    thread.join(60)
    assert results == ["1\n"]


def test_a_box_killed_before_its_program_starts_is_tried_again(bwrap: None, tmp_path: Path) -> None:
    fragile, mark = tmp_path / "bwrap", tmp_path / "again"
    real = plan_for(DEFAULT_MINIMUM).bwrap
    fragile.write_text(
        f'#!/bin/sh\nif test -e {mark}; then exec {real} "$@"; fi\ntouch {mark}\nkill -9 $$\n'
    )
    for path in (fragile, tmp_path, *list(tmp_path.parents)[:2]):
        path.chmod(0o777)
    plan = dataclasses.replace(plan_for(DEFAULT_MINIMUM), bwrap=str(fragile))
    assert run_job(Job("print(1)"), plan).stdout == "1\n"
    assert mark.exists()


def test_a_box_not_yet_bound_to_its_wardens_life_is_killed_by_the_caller(
    bwrap: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bubblewrap asks to die with its parent some time after it starts: here it never gets there."""
    monkeypatch.setattr(client, "_ATTEMPTS", 1)
    slow = tmp_path / "bwrap"
    slow.write_text("#!/bin/sh\nsleep 1000\n")
    slow.chmod(0o755)
    plan = dataclasses.replace(plan_for(DEFAULT_MINIMUM), bwrap=str(slow))
    pid = warden_pid()
    raised: list[str] = []

    def sleepers() -> set[int]:
        return {*members(pid)} & {*processes_that_mention("sleep")}

    def run() -> None:
        try:
            run_job(Job("pass"), plan)
        except SandboxError as error:
            raised.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    assert wait_until(sleepers)
    os.kill(pid, signal.SIGKILL)
    thread.join(60)
    assert "warden was killed" in raised[0]
    assert members(pid) == []


def test_a_killed_trainer_leaves_no_box_no_warden_no_group(bwrap: None) -> None:
    code = (
        "from hone.sandbox import client, run_python\nrun_python('pass')\n"
        "print(client._warden._process.pid, flush=True)\n"
        "run_python('import time; time.sleep(1000)', timeout_s=500.0)"
    )
    root = Path(__file__).resolve().parents[2]
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert trainer.stdout is not None
    pid = int(trainer.stdout.readline())
    assert wait_until(lambda: len(descendants(pid)) >= 3)
    everyone = [pid, *descendants(pid)]
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{p}/exe") for p in everyone))
    assert wait_until(lambda: remains(pid) == [])


def test_a_caller_that_gives_up_ends_its_run(bwrap: None) -> None:
    pid = warden_pid()
    forked = os.fork()
    if forked == 0:  # shares our warden, then is killed in the middle of a run
        run_python("import time; time.sleep(1000)", timeout_s=500.0)
        os._exit(0)
    assert wait_until(lambda: len(descendants(pid)) >= 3)
    os.kill(forked, signal.SIGKILL)
    os.waitpid(forked, 0)
    assert wait_until(lambda: descendants(pid) == [])


def test_closing_ends_the_warden(bwrap: None) -> None:
    pid = warden_pid()
    client.close()
    assert not os.path.exists(f"/proc/{pid}")
