"""The ports of a raylet's agents, with a stand-in for the start of the raylet."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from ray._private import services

from hone.launch.ray_private import AGENT_PORTS, fixed_agent_ports


def test_a_raylet_knows_the_ports_of_its_agents_before_they_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
