"""The layers of this machine are reported, and a missing one stops a run before it starts."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hone.sandbox import (
    Job,
    LayerState,
    SandboxError,
    SandboxUnavailable,
    Status,
    bubblewrap,
    client,
    landlock,
    layers,
    run_python,
)
from hone.sandbox.client import run_job
from hone.sandbox.layers import DEFAULT_MINIMUM, GUARANTEES, LAYERS, _probe_machine, box_plan_for
from hone.sandbox.plan import BoxPlan

from .attacks import NETWORK, TRY_TO_WRITE, processes_that_mention


def clear_caches() -> None:
    """Makes the next use probe the machine again."""
    _probe_machine.cache_clear()
    bubblewrap.find_bubblewrap.cache_clear()


@pytest.fixture
def without_bwrap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    clear_caches()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.which", lambda *_, **__: None)
        bubblewrap.find_bubblewrap()  # caches that there is none
    yield
    clear_caches()


def test_every_layer_is_reported_with_a_detail() -> None:
    states = layers()
    assert set(states) == set(LAYERS)
    assert all(state.detail for state in states.values())


def test_missing_bubblewrap_fails_closed_and_names_the_install_command(without_bwrap: None) -> None:
    assert not layers()["bubblewrap"].active
    with pytest.raises(SandboxUnavailable, match=r"'processes'.*apt-get install -y bubblewrap"):
        run_python("print('must not run')")


def test_broken_bubblewrap_fails_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: no permission to make namespaces' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    clear_caches()
    try:
        with pytest.raises(SandboxUnavailable, match="no permission to make namespaces"):
            run_python("print('must not run')")
    finally:
        clear_caches()


def test_threads_that_ask_first_at_once_get_the_same_layers() -> None:
    expected, barrier = layers(), threading.Barrier(6)

    def first_use() -> dict[str, LayerState]:
        barrier.wait()
        return layers()

    for _ in range(3):
        clear_caches()
        with ThreadPoolExecutor(6) as pool:
            results = [pool.submit(first_use) for _ in range(6)]
        assert [future.result() for future in results] == [expected] * 6


def test_unknown_minimum_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"minimum names 'filesytem'.*known: filesystem"):
        run_python("pass", minimum={"filesytem"})


def test_every_guarantee_is_provided_by_known_layers() -> None:
    assert set(GUARANTEES) >= DEFAULT_MINIMUM
    assert all(set(providers) <= set(LAYERS) for providers in GUARANTEES.values())


def test_a_required_layer_that_is_missing_is_named(without_bwrap: None) -> None:
    with pytest.raises(SandboxUnavailable, match="asks for 'bubblewrap'"):
        run_python("pass", minimum={"bubblewrap"})


def test_namespaces_alone_stop_the_network(bwrap: None) -> None:
    plan = dataclasses.replace(box_plan_for(DEFAULT_MINIMUM), use_seccomp=False)
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
    ):
        udp.bind(("127.0.0.1", 0))
        ports = (str(tcp.getsockname()[1]), str(udp.getsockname()[1]))
        result = run_job(Job(NETWORK, argv=ports), plan)
        assert result.stdout == "refused refused refused refused\n", result
        udp.settimeout(0.05)
        with pytest.raises(TimeoutError):
            udp.recv(1)


def test_without_a_cgroup_total_memory_is_still_limited(bwrap: None) -> None:
    plan = dataclasses.replace(box_plan_for(DEFAULT_MINIMUM), parent_cgroups=None)
    code = "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n"
    code += "        x = bytearray(b'x') * (80 << 20); time.sleep(99)\ntime.sleep(99)"
    result = run_job(Job(code, memory_mb=256, timeout_s=60.0), plan)
    assert result.status is Status.MEMORY


def test_without_proc_the_box_still_works(bwrap: None) -> None:
    plan = dataclasses.replace(box_plan_for(DEFAULT_MINIMUM), mount_proc=False)
    result = run_job(Job("import os; print(os.path.exists('/proc/self'))"), plan)
    assert result.stdout == "False\n"


# ---- the box without bubblewrap ----


@pytest.fixture
def landlock_plan(without_bwrap: None) -> BoxPlan:
    if landlock.abi_version() == 0:
        pytest.skip("this kernel has no Landlock: there is no box without bubblewrap")
    return box_plan_for({"filesystem", "network"})


def test_landlock_and_seccomp_isolate_without_bubblewrap(
    landlock_plan: BoxPlan, tmp_path: Path
) -> None:
    assert landlock_plan.bwrap_path is None
    result = run_job(Job("print(input())", stdin="hello\n"), landlock_plan)
    assert (result.status, result.stdout) == (Status.OK, "hello\n"), result
    tmp_path.chmod(0o777)
    victim = tmp_path / "victim"
    victim.write_text("planted-secret")
    victim.chmod(0o666)
    targets = (str(victim), str(tmp_path / "new"), "/tmp/hone-planted")
    assert run_job(Job(TRY_TO_WRITE, argv=targets), landlock_plan).stdout == ""
    result = run_job(Job(f"print(open({str(victim)!r}).read())"), landlock_plan)
    assert "PermissionError" in result.stderr
    assert (victim.read_text(), (tmp_path / "new").exists()) == ("planted-secret", False)


def test_landlock_box_reaches_no_network_and_no_other_process(landlock_plan: BoxPlan) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
    ):
        udp.bind(("127.0.0.1", 0))
        ports = (str(tcp.getsockname()[1]), str(udp.getsockname()[1]))
        assert (
            run_job(Job(NETWORK, argv=ports), landlock_plan).stdout
            == "refused refused refused refused\n"
        )
    code = f"import os\nprint(open('/proc/{os.getpid()}/environ').read())"
    assert "PermissionError" in run_job(Job(code), landlock_plan).stderr
    assert not run_job(Job(f"import os; os.kill({os.getpid()}, 0)"), landlock_plan).ok


@pytest.mark.parametrize("code", [126, 127])
def test_landlock_box_reports_every_exit_code_as_the_programs(
    landlock_plan: BoxPlan, code: int
) -> None:
    result = run_job(Job(f"import os; os._exit({code})"), landlock_plan)
    assert (result.status, result.exit_code) == (Status.ERROR, code)


def test_landlock_box_that_cannot_be_built_is_an_error_and_not_a_result(
    landlock_plan: BoxPlan,
) -> None:
    absent = dataclasses.replace(landlock_plan.interpreter, executable="/usr/bin/absent")
    with pytest.raises(SandboxError, match="FileNotFoundError"):
        run_job(Job("pass"), dataclasses.replace(landlock_plan, interpreter=absent))


def test_landlock_box_kills_processes_that_a_program_leaves(landlock_plan: BoxPlan) -> None:
    token = uuid.uuid4().hex
    code = """
import os, sys
executed, inherited = os.pipe()  # exec closes it, so reading ends when the child runs its program
if os.fork() == 0:
    try:
        os.setsid()
    except PermissionError:
        print('stays in its group', flush=True)
    os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(1000)', sys.argv[1]])
os.close(inherited)
assert os.read(executed, 1) == b''
"""
    result = run_job(Job(code, argv=(token,), processes=4096), landlock_plan)
    assert (result.status, result.stdout) == (Status.OK, "stays in its group\n"), result
    assert processes_that_mention(token) == []


def test_landlock_box_removes_its_directory_even_without_permissions(
    landlock_plan: BoxPlan,
) -> None:
    code = "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w')\nos.chmod('a/b', 0)\nos.chmod('a', 0)"
    code += "\nfor _ in range(1050):\n    os.mkdir('d')\n    os.chdir('d')\n"
    assert run_job(Job(code, timeout_s=60.0), landlock_plan).ok
    process = client._warden._process
    assert process is not None
    assert list(Path("/tmp").glob(f"hone-box-{process.pid}-*")) == []
    assert run_job(Job("while True: pass", timeout_s=0.3), landlock_plan).status is Status.TIMEOUT
