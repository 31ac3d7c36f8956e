"""The connections to nodes: what a setup line writes, and how they end. No Ray is started."""

from __future__ import annotations

import json
import subprocess
import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from hone.launch import cluster
from hone.launch.cluster import LaunchError, LaunchPlan, _NamedProcesses, _Node, _stop_processes
from hone.launch.node import NodeSettings, NodeStatus

from .test_scripts import program

SETTINGS = NodeSettings(mark="m", token="t")


def plan(folder: Path, python: str, setup: str = "") -> LaunchPlan:
    """A plan whose interpreter is a shell script."""
    file = program(folder, "python", f"#!/bin/bash\n{python}\n")
    return LaunchPlan("local", ("here",), ("hone",), str(folder), python=str(file), setup=setup)


def test_what_a_setup_line_writes_before_the_answer_is_passed_over(tmp_path: Path) -> None:
    answer = json.dumps(asdict(NodeStatus(address="here:1")))
    setup = r"echo loading; printf 'modules \377\n'"
    nodes: _NamedProcesses = []
    node = _Node(plan(tmp_path, f"echo '{answer}'", setup), "here", SETTINGS, nodes)
    assert node.wait_until_ready(threading.Event()).address == "here:1"
    _stop_processes(nodes)


def test_a_node_that_answers_nothing_and_stays_is_a_launch_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "END_DEADLINE_S", 0.2)
    nodes: _NamedProcesses = []
    node = _Node(plan(tmp_path, "exec >&-; exec sleep 60"), "here", SETTINGS, nodes)
    with pytest.raises(LaunchError, match="the node here did not start: no answer"):
        node.wait_until_ready(threading.Event())
    _stop_processes(nodes)


def test_every_connection_is_closed_before_one_is_waited_for() -> None:
    nodes: _NamedProcesses = []
    for name in ("first", "second"):
        nodes.append((name, subprocess.Popen(["cat"], stdin=subprocess.PIPE, text=True)))
    first, second = (process for _, process in nodes)
    closed: list[bool] = []

    def wait(timeout: float | None = None) -> int:
        assert second.stdin is not None
        closed.append(second.stdin.closed)
        return subprocess.Popen.wait(first, timeout)

    first.wait = wait  # type: ignore[method-assign]
    _stop_processes(nodes)
    assert closed[0] is True
    assert [process.returncode for _, process in nodes] == [0, 0]
