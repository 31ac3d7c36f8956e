"""Ports that are free, and no other process's meanwhile."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

import hone.launch.free_ports as module
from hone.launch.free_ports import free_ports

ANOTHER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("ports", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module._candidate_ports = lambda: [int(word) for word in sys.argv[2:]]
print(*module.free_ports(2), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def ephemeral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says which ports the kernel gives to outgoing connections."""
    file = tmp_path / "range"
    monkeypatch.setattr(module, "EPHEMERAL_RANGE_FILE", file)
    return file


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("32768\t60999\n", {20_000, 32_767}, {61_000, 65_535}),
        ("15000 64000", {64_001}, {65_535}),
        ("1024 65535", {20_000}, {65_535}),  # no port is outside: all but Ray's
        ("no numbers", {20_000}, {32_767}),
        (None, {20_000}, {32_767}),
    ],
)
def test_ports_are_outside_the_ephemeral_range_and_above_those_of_ray_s_workers(
    text: str | None, low: set[int], high: set[int], ephemeral: Path
) -> None:
    if text is not None:
        ephemeral.write_text(text)
    candidates = module._candidate_ports()
    assert {candidates[0], candidates[-1]} <= low | high
    assert low | high <= set(candidates)
    assert set(free_ports(20)) <= set(candidates)


def test_a_port_with_a_server_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        (other,) = free_ports(1)
        module._reservations.pop()[1].close()
        monkeypatch.setattr(module, "_candidate_ports", lambda: [taken, other])
        assert free_ports(1) == [other]
        with pytest.raises(OSError, match="fewer than 1 free ports"):
            free_ports(1)


def test_two_processes_do_not_get_the_same_ports_until_the_first_ends_or_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ports = free_ports(4)
    while module._reservations:
        module._reservations.popleft()[1].close()
    program = [sys.executable, "-S", "-c", ANOTHER, module.__file__, *map(str, ports)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    monkeypatch.setattr(module, "_candidate_ports", lambda: ports)
    with subprocess.Popen(program, text=True, **pipes) as another:
        assert another.stdout is not None
        theirs = {int(word) for word in another.stdout.readline().split()}
        assert set(free_ports(2)) == set(ports) - theirs
        with pytest.raises(OSError, match="fewer than 1 free ports"):
            free_ports(1)
        another.communicate()
    assert set(free_ports(2)) == theirs
    monkeypatch.setattr(module.time, "monotonic", lambda: 1e12)
    assert set(free_ports(4)) == set(ports)
