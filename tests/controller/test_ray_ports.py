"""Free ports, and those of a raylet's agents, with a stand-in for the start of the raylet."""

from __future__ import annotations

import inspect
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hone.controller import ray_ports
from hone.controller.ray_ports import AGENT_PORTS, fixed_agent_ports, free_ports

ANOTHER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("ray_ports", sys.argv[1])
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
    monkeypatch.setattr(ray_ports, "EPHEMERAL_RANGE_FILE", file)
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
    candidates = ray_ports._candidate_ports()
    assert {candidates[0], candidates[-1]} <= low | high
    assert low | high <= set(candidates)
    assert set(free_ports(20)) <= set(candidates)


def test_a_port_with_a_server_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        (other,) = free_ports(1)
        ray_ports._reservations.pop()[1].close()
        monkeypatch.setattr(ray_ports, "_candidate_ports", lambda: [taken, other])
        assert free_ports(1) == [other]
        with pytest.raises(OSError, match="fewer than 1 free ports"):
            free_ports(1)


def test_two_processes_do_not_get_the_same_ports_until_the_first_ends_or_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ports = free_ports(4)
    while ray_ports._reservations:
        ray_ports._reservations.popleft()[1].close()
    program = [sys.executable, "-S", "-c", ANOTHER, ray_ports.__file__, *map(str, ports)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    monkeypatch.setattr(ray_ports, "_candidate_ports", lambda: ports)
    with subprocess.Popen(program, text=True, **pipes) as another:
        assert another.stdout is not None
        theirs = {int(word) for word in another.stdout.readline().split()}
        assert set(free_ports(2)) == set(ports) - theirs
        with pytest.raises(OSError, match="fewer than 1 free ports"):
            free_ports(1)
        another.communicate()
    assert set(free_ports(2)) == theirs
    monkeypatch.setattr(ray_ports.time, "monotonic", lambda: 1e12)
    assert set(free_ports(4)) == set(ports)


def test_a_raylet_knows_the_ports_of_its_agents_before_they_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = pytest.importorskip("ray._private.services")
    real, calls = services.start_raylet, []
    node_id = "ab" * 28

    def stand_in(
        node_id: str,
        session_dir: str,
        metrics_agent_port: int | None = None,
        metrics_export_port: int | None = None,
        dashboard_agent_listen_port: int | None = None,
        runtime_env_agent_port: int | None = None,
    ) -> None:
        calls.append({name: value for name, value in locals().items() if name in AGENT_PORTS})

    for name in AGENT_PORTS:
        assert name in inspect.signature(real).parameters
    monkeypatch.setattr(services, "start_raylet", stand_in)
    options: dict[str, Any] = {"session_dir": str(tmp_path), "metrics_agent_port": 0}
    with fixed_agent_ports():
        services.start_raylet(node_id, **options)
    assert services.start_raylet is stand_in
    (ports,) = calls
    assert len(set(ports.values()) - {0, None}) == len(AGENT_PORTS)
    (file,) = tmp_path.iterdir()
    assert file.name == f"dashboard_agent_listen_port_{node_id}"
    assert file.read_text() == str(ports["dashboard_agent_listen_port"])
