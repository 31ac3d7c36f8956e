"""Cgroups of both versions are found, limited and removed."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from hone.sandbox import cgroups
from hone.sandbox.cgroups import Cgroup, ParentCgroups


def fake_proc(tmp_path: Path, membership: str, kind: str, mount: Path, options: str) -> Path:
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(membership)
    (proc / "mountinfo").write_text(f"30 20 0:26 / {mount} rw - {kind} cgroup {options}\n")
    return proc


def test_version_2_enables_controllers_and_creates_cgroups_below_our_own(tmp_path: Path) -> None:
    own = tmp_path / "tree" / "service"
    own.mkdir(parents=True)
    (own / "cgroup.controllers").write_text("cpu memory pids\n")
    (own / "cgroup.subtree_control").write_text("\n")
    proc = fake_proc(tmp_path, "0::/service\n", "cgroup2", tmp_path / "tree", "rw")
    parents = cgroups._find_v2(
        *[(proc / n).read_text().splitlines() for n in ("cgroup", "mountinfo")]
    )
    assert parents == ParentCgroups(2, {"memory": str(own), "pids": str(own)})
    assert (own / "cgroup.subtree_control").read_text() == "+memory +pids"


def test_version_1_finds_each_controller_in_its_own_hierarchy(tmp_path: Path) -> None:
    (tmp_path / "memory" / "job").mkdir(parents=True)
    memberships = ["4:memory:/job", "8:pids:/not/seen/here"]
    mounts = [
        f"30 20 0:26 / {tmp_path}/memory rw - cgroup cgroup rw,memory",
        f"31 20 0:27 / {tmp_path}/pids rw - cgroup cgroup rw,pids",
    ]
    parents = cgroups._find_v1(memberships, mounts)
    assert parents.directories == {
        "memory": f"{tmp_path}/memory/job",
        "pids": f"{tmp_path}/pids",  # a container sees its own cgroup as the root
    }


def test_limits_are_written_to_the_files_of_each_version(tmp_path: Path) -> None:
    for version, name in ((1, "memory.limit_in_bytes"), (2, "memory.max")):
        base = tmp_path / str(version)
        base.mkdir()
        parents = ParentCgroups(version, {"memory": str(base), "pids": str(base)})
        cgroup = Cgroup.create(parents, "hone-1-1", memory_bytes=1 << 20, max_processes=7)
        assert (base / "hone-1-1" / name).read_text() == str(1 << 20)
        assert (base / "hone-1-1" / "pids.max").read_text() == "7"
        events = "memory.oom_control" if version == 1 else "memory.events"
        (base / "hone-1-1" / events).write_text("oom_kill_disable 0\noom_kill 0\n")
        assert not cgroup.out_of_memory()
        (base / "hone-1-1" / events).write_text("oom_kill_disable 0\noom_kill 2\n")
        assert cgroup.out_of_memory()


def test_missing_cgroups_are_reported_and_not_an_error(tmp_path: Path) -> None:
    parents, reason = cgroups.find_parents(tmp_path)
    assert parents is None
    assert "cgroups cannot be read" in reason
    proc = fake_proc(tmp_path, "0::/\n", "tmpfs", tmp_path, "rw")
    assert cgroups.find_parents(proc) == (None, "no memory or pids controller is mounted")


def test_the_reason_why_version_2_gives_no_cgroup_is_reported(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("memory pids\n")
    proc = fake_proc(tmp_path, "0::/\n", "cgroup2", tmp_path, "rw")
    parents, reason = cgroups.find_parents(proc)
    assert parents is None
    assert reason.startswith("v2 cgroups cannot be created: No such file")
    assert "cgroup.subtree_control" in reason


def test_only_cgroups_of_dead_processes_are_stale(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    others = [tmp_path / f"hone-{os.getpid()}-1", tmp_path / "other"]
    for directory in (tmp_path / f"hone-{dead.pid}-1", *others):
        directory.mkdir()
    cgroups.remove_stale_cgroups(ParentCgroups(2, {"memory": str(tmp_path)}))
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_a_real_cgroup_has_members_kills_them_and_is_removed() -> None:
    parents, reason = cgroups.find_parents()
    if parents is None:
        pytest.skip(f"no cgroup can be created here: {reason}")
    cgroup = Cgroup.create(
        parents, cgroups.cgroup_name(999), memory_bytes=64 << 20, max_processes=4
    )
    pid = os.fork()
    if pid == 0:
        cgroup.add_process(os.getpid())
        time.sleep(100)
        os._exit(0)
    try:
        members = [
            Path(base, cgroups.cgroup_name(999), "cgroup.procs")
            for base in parents.unique_directories
        ]
        deadline = time.monotonic() + 60
        while not all(str(pid) in m.read_text().split() for m in members):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not cgroup.remove()
        cgroup.kill()
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == 9
    finally:
        deadline = time.monotonic() + 60
        while not cgroup.remove():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not any(member.exists() for member in members)


def test_limits_can_be_raised_and_lowered() -> None:
    parents, reason = cgroups.find_parents()
    if parents is None:
        pytest.skip(f"no cgroup can be created here: {reason}")
    cgroup = Cgroup.create(
        parents, cgroups.cgroup_name(998), memory_bytes=64 << 20, max_processes=4
    )
    try:
        for size, processes in ((256 << 20, 9), (32 << 20, 3)):
            cgroup.set_limits(memory_bytes=size, max_processes=processes)
            name = "memory.max" if parents.version == 2 else "memory.limit_in_bytes"
            if "memory" in cgroup.directories:
                assert (cgroup.directories["memory"] / name).read_text().strip() == str(size)
            if "pids" in cgroup.directories:
                assert (cgroup.directories["pids"] / "pids.max").read_text().strip() == str(
                    processes
                )
    finally:
        assert cgroup.remove()


def test_a_process_started_by_a_thread_inside_is_a_member_and_the_thread_returns() -> None:
    parents, reason = cgroups.find_parents()
    if parents is None or parents.version != 1:
        pytest.skip(f"needs cgroups of version 1: {reason}")
    cgroup = Cgroup.create(
        parents, cgroups.cgroup_name(997), memory_bytes=64 << 20, max_processes=8
    )
    before = Path("/proc/thread-self/cgroup").read_text()
    with cgroup.thread_inside():
        child = subprocess.Popen(["sleep", "100"])
    try:
        assert Path("/proc/thread-self/cgroup").read_text() == before
        members = [directory / "cgroup.procs" for directory in cgroup.directories.values()]
        assert all(member.read_text().split() == [str(child.pid)] for member in members)
    finally:
        child.kill()
        child.wait()
        while not cgroup.remove():
            time.sleep(0.01)
