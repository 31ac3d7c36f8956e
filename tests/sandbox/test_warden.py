"""No process, file or cgroup is left, even if the warden, the trainer or the box is killed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hone.sandbox import Job, SandboxError, Status, cgroups, client, run_many, run_python
from hone.sandbox.client import run_job
from hone.sandbox.layers import DEFAULT_MINIMUM, box_plan_for
from hone.sandbox.plan import RunRequest

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
CPU_BOUND = ("fork bomb", "endless loop")  # these use a whole core until their timeout


def hostile_jobs(count: int, cpu_bound_every: int) -> list[dict[str, Any]]:
    quick = [job for name, job in HOSTILE.items() if name not in CPU_BOUND]
    cpu_bound = [HOSTILE[name] for name in CPU_BOUND]
    return [
        cpu_bound[(i // cpu_bound_every) % len(cpu_bound)]
        if i % cpu_bound_every == 0
        else quick[i % len(quick)]
        for i in range(count)
    ]


def members(session: int) -> list[int]:
    """Returns the living processes of a session."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a process may end meanwhile
            if os.getsid(int(entry.name)) == session and (entry / "exe").exists():
                pids.append(int(entry.name))
    return pids


def descendants(pid: int) -> list[int]:
    pids = []
    with contextlib.suppress(OSError):  # a process may end meanwhile
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                pids += [int(child), *descendants(int(child))]
    return pids


def leftovers(warden: int) -> list[str]:
    """Returns the files and cgroups that a warden's boxes left on this machine."""
    parents, _ = cgroups.find_parents()
    folders = [*(parents.unique_directories if parents else ()), "/tmp"]
    names = [str(p) for folder in folders for p in Path(folder).glob(f"hone-*{warden}-*")]
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


def count_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def attack(count: int, cpu_bound_every: int) -> None:
    box_plan_for(DEFAULT_MINIMUM)  # the probe runs a program
    client.close()
    pid = warden_pid()  # one run builds no spare, so only the warden's own descriptors are open
    open_before = count_descriptors(pid)
    jobs = [Job(**job) for job in hostile_jobs(count, cpu_bound_every)]
    statuses = Counter(result.status for result in run_many(jobs, max_concurrent=4))
    assert set(statuses) >= {Status.TIMEOUT, Status.MEMORY, Status.OUTPUT, Status.ERROR}, statuses
    assert warden_pid() == pid
    assert wait_until(lambda: descendants(pid) == [])
    assert wait_until(lambda: leftovers(pid) == [])
    assert wait_until(lambda: count_descriptors(pid) == open_before)
    assert run_python("print('works')").stdout == "works\n"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_storm_of_hostile_runs_leaves_nothing_behind(bwrap: None) -> None:
    attack(int(os.environ.get("HONE_HOSTILE_RUNS", "400")), cpu_bound_every=25)


@pytest.mark.slow
def test_120_hostile_runs_as_uid_65534_leave_nothing_behind(nobody: Any) -> None:
    nobody.ask({"code": "pass"})
    pid = nobody.ask({"ask": "facts"})["warden"]
    request = {"ask": "many", "max_concurrent": 4, "jobs": hostile_jobs(120, cpu_bound_every=12)}
    assert set(nobody.ask(request)) >= {"timeout", "memory", "output", "error"}
    assert wait_until(lambda: descendants(pid) == [])
    assert wait_until(lambda: leftovers(pid) == [])


@pytest.mark.slow
def test_a_killed_warden_ends_its_boxes_and_is_replaced(bwrap: None) -> None:
    client.close()
    pid = warden_pid()
    errors: list[Exception] = []

    def run_long() -> None:
        try:
            # Arguments prevent a spare, so the third process below is the program.
            run_python("import time; time.sleep(1000)", timeout_s=50.0, argv=["x"])
        except SandboxError as error:
            errors.append(error)

    thread = threading.Thread(target=run_long)
    thread.start()
    assert wait_until(lambda: len(descendants(pid)) >= 3)
    box_pids = descendants(pid)
    os.kill(pid, signal.SIGKILL)
    thread.join(60)
    assert "warden ended" in str(errors[0])
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{child}/exe") for child in box_pids))
    assert run_python("print(1)").stdout == "1\n"
    assert warden_pid() != pid
    assert wait_until(lambda: leftovers(pid) == [])  # the next warden removes stale cgroups


@pytest.mark.slow
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
        assert wait_until(lambda warden=pid, ended=outcomes: descendants(warden) or ended)
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
def test_no_invalid_request_ends_the_warden_or_other_runs(
    bwrap: None, limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Job refuses these values; here they are sent to the warden anyway."""
    pid = warden_pid()
    plan = box_plan_for(DEFAULT_MINIMUM)
    other = client.Run(Job("import time; time.sleep(0.3); print(1)", timeout_s=60.0), plan)
    request = RunRequest.from_job(Job("pass"), plan)
    for name, value in limits.items():
        object.__setattr__(request if name == "plan" else request.job, name, value)
    with monkeypatch.context() as patched:
        patched.setattr(RunRequest, "from_job", lambda *_, **__: request)
        with contextlib.suppress(SandboxError):
            run_job(Job("pass", timeout_s=20.0), plan)
    with other:
        assert other.result().stdout == "1\n"
    assert warden_pid() == pid


@pytest.mark.slow
def test_a_warden_killed_while_it_starts_is_retried(
    bwrap: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = box_plan_for(DEFAULT_MINIMUM)
    flag = tmp_path / "again"
    fragile = f"import os\nif not os.path.exists({str(flag)!r}):\n"
    fragile += f"    open({str(flag)!r}, 'w').close()\n    os.kill(os.getpid(), 9)\n"
    monkeypatch.setattr(client, "_WARDEN_PROGRAM", fragile + client._WARDEN_PROGRAM)
    client.close()
    assert run_job(Job("print(1)"), plan).stdout == "1\n"
    assert flag.exists()
    monkeypatch.setattr(client, "_WARDEN_PROGRAM", "import os; os.kill(os.getpid(), 9)")
    client.close()
    with pytest.raises(SandboxError, match="warden"):
        run_job(Job("print(1)"), plan)
    monkeypatch.undo()
    assert run_job(Job("print(1)"), plan).stdout == "1\n"


def test_a_warden_killed_before_the_program_starts_is_retried(bwrap: None, tmp_path: Path) -> None:
    slow, flag = tmp_path / "bwrap", tmp_path / "again"
    real = box_plan_for(DEFAULT_MINIMUM).bwrap_path
    slow.write_text(f'#!/bin/sh\nif test -e {flag}; then exec {real} "$@"; fi\nexec sleep 1000\n')
    for path in (slow, tmp_path, *list(tmp_path.parents)[:2]):
        path.chmod(0o755)
    plan = dataclasses.replace(box_plan_for(DEFAULT_MINIMUM), bwrap_path=str(slow))
    pid = warden_pid()
    results: list[str] = []
    thread = threading.Thread(
        target=lambda: results.append(run_job(Job("print(1)"), plan).stdout), daemon=True
    )
    thread.start()
    assert wait_until(lambda: {*members(pid)} & {*processes_that_mention("sleep")})
    flag.touch()
    os.kill(pid, signal.SIGKILL)
    thread.join(60)
    assert results == ["1\n"]


def test_a_box_killed_before_its_program_starts_is_retried(bwrap: None, tmp_path: Path) -> None:
    fragile, flag = tmp_path / "bwrap", tmp_path / "again"
    real = box_plan_for(DEFAULT_MINIMUM).bwrap_path
    fragile.write_text(
        f'#!/bin/sh\nif test -e {flag}; then exec {real} "$@"; fi\ntouch {flag}\nkill -9 $$\n'
    )
    for path in (fragile, tmp_path, *list(tmp_path.parents)[:2]):
        path.chmod(0o777)
    plan = dataclasses.replace(box_plan_for(DEFAULT_MINIMUM), bwrap_path=str(fragile))
    assert run_job(Job("print(1)"), plan).stdout == "1\n"
    assert flag.exists()


def test_the_caller_kills_a_box_that_does_not_die_with_its_warden_yet(
    bwrap: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bubblewrap sets its parent-death signal some time after it starts; this one never does."""
    monkeypatch.setattr(client, "_MAX_ATTEMPTS", 1)
    slow = tmp_path / "bwrap"
    slow.write_text("#!/bin/sh\nsleep 1000\n")
    slow.chmod(0o755)
    plan = dataclasses.replace(box_plan_for(DEFAULT_MINIMUM), bwrap_path=str(slow))
    pid = warden_pid()
    errors: list[str] = []

    def sleepers() -> set[int]:
        return {*members(pid)} & {*processes_that_mention("sleep")}

    def run() -> None:
        try:
            run_job(Job("pass"), plan)
        except SandboxError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    assert wait_until(sleepers)
    os.kill(pid, signal.SIGKILL)
    thread.join(60)
    assert "warden was killed" in errors[0]
    assert members(pid) == []


def test_a_killed_trainer_leaves_no_box_warden_or_cgroup(bwrap: None) -> None:
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
    pids = [pid, *descendants(pid)]
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{p}/exe") for p in pids))
    assert wait_until(lambda: leftovers(pid) == [])


TRAINER = """
import dataclasses, sys, threading, time
from hone.sandbox import Job, client, run_python
from hone.sandbox.client import run_job
from hone.sandbox.layers import DEFAULT_MINIMUM, box_plan_for

plan = box_plan_for(DEFAULT_MINIMUM)
if len(sys.argv) > 1:
    plan = dataclasses.replace(plan, bwrap_path=sys.argv[1])

def work(argv):
    while True:
        run_job(Job("pass", argv=argv), plan)

run_python("pass")
print(client._warden._process.pid, flush=True)
for argv in ((), (), ("x",)):
    threading.Thread(target=work, args=[argv], daemon=True).start()
time.sleep(1000)
"""


@contextlib.contextmanager
def trainer_that_builds_boxes(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Starts a trainer; yields it and the pid of its warden, and kills the trainer at the end."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", TRAINER, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as trainer:
        assert trainer.stdout is not None
        try:
            yield trainer, int(trainer.stdout.readline())
        finally:
            trainer.kill()


def test_a_box_that_does_not_die_with_its_warden_yet_is_killed_after_trainer_and_warden(
    bwrap: None, tmp_path: Path
) -> None:
    slow = tmp_path / "bwrap"
    slow.write_text("#!/bin/sh\nsleep 1000\n")
    slow.chmod(0o755)
    with trainer_that_builds_boxes(str(slow)) as (trainer, pid):
        assert wait_until(lambda: {*members(pid)} & {*processes_that_mention("sleep")})
        trainer.kill()
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: members(pid) == [])


@pytest.mark.slow
def test_a_trainer_and_a_warden_that_are_killed_while_they_build_boxes_leave_none(
    bwrap: None,
) -> None:
    chooser = random.Random(1)
    for _ in range(40):
        with trainer_that_builds_boxes() as (trainer, pid):
            time.sleep(0.1 * chooser.random())
            first, second = chooser.sample([trainer.pid, pid], 2)
            os.kill(first, signal.SIGKILL)
            time.sleep(chooser.choice([0.0, 0.002 * chooser.random(), 0.02 * chooser.random()]))
            with contextlib.suppress(ProcessLookupError):
                os.kill(second, signal.SIGKILL)
        assert wait_until(lambda warden=pid: members(warden) == [])


def test_callers_that_hang_up_while_their_box_is_built_leave_none_without_a_cgroup(
    bwrap: None,
) -> None:
    plan = dataclasses.replace(box_plan_for(DEFAULT_MINIMUM), parent_cgroups=None)
    client.close()
    pid = warden_pid()
    chooser = random.Random(1)
    for _ in range(40):
        with client.Run(Job("pass", argv=["x"]), plan):
            time.sleep(0.012 * chooser.random())
    assert wait_until(lambda: descendants(pid) == [])


def test_a_killed_caller_ends_its_run(bwrap: None) -> None:
    forked = os.fork()
    if forked == 0:  # starts its own warden and is killed during a run
        run_python("import time; time.sleep(1000)", timeout_s=500.0)
        os._exit(0)
    assert wait_until(lambda: len(descendants(forked)) >= 4)
    pids = descendants(forked)
    os.kill(forked, signal.SIGKILL)
    os.waitpid(forked, 0)
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in pids))


def test_a_forked_process_keeps_neither_the_warden_nor_a_run(bwrap: None) -> None:
    pid = warden_pid()
    run = client.Run(Job("import time; time.sleep(99)", timeout_s=100.0), box_plan_for(()))
    assert wait_until(lambda: len(descendants(pid)) >= 2)
    read_end, write_end = os.pipe()
    forked = os.fork()
    if forked == 0:  # such as a worker of a data loader
        own_pid = warden_pid()
        client.close()
        os.write(write_end, str(own_pid).encode())
        time.sleep(99)
        os._exit(0)
    try:
        assert int(os.read(read_end, 32)) != pid
        run.close()
        assert wait_until(lambda: descendants(pid) == [])
        assert run_python("print(1)").ok
        client.close()
        assert not os.path.exists(f"/proc/{pid}")
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)
        os.close(read_end)
        os.close(write_end)


def test_closing_ends_the_warden(bwrap: None) -> None:
    pid = warden_pid()
    client.close()
    assert not os.path.exists(f"/proc/{pid}")
