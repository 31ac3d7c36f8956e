"""The connections to nodes: what a setup line writes, and how they end. No Ray is started."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from hone.launch import LaunchError, cluster
from hone.launch.cluster import LaunchPlan, _NamedProcesses, _Node, _stop_processes
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


@pytest.mark.parametrize("end", ["", ";", "  # the cluster's modules", " &"])
def test_a_setup_line_may_end_as_in_a_shell(tmp_path: Path, end: str) -> None:
    answer = json.dumps(asdict(NodeStatus(address="here:1")))
    nodes: _NamedProcesses = []
    node = _Node(plan(tmp_path, f"echo '{answer}'", f"true{end}"), "here", SETTINGS, nodes)
    assert node.wait_until_ready(threading.Event()).address == "here:1"
    _stop_processes(nodes)


def test_a_setup_line_that_fails_stops_the_node(tmp_path: Path) -> None:
    nodes: _NamedProcesses = []
    node = _Node(plan(tmp_path, "echo '{}'", "cd /no-such-folder"), "here", SETTINGS, nodes)
    with pytest.raises(LaunchError, match="no-such-folder"):
        node.wait_until_ready(threading.Event())
    _stop_processes(nodes)


def test_a_second_signal_ends_the_job_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_to_wait(processes: _NamedProcesses) -> None:
        assert all(process.wait(60) for _, process in processes)

    monkeypatch.setattr(cluster, "_stop_processes", refuse_to_wait)
    lines: list[str] = []
    stop_event = threading.Event()
    stop_event.set()

    def report(line: str) -> None:
        lines.append(line)
        stop_event.set()

    status = cluster._run_job(plan(tmp_path, "exec sleep 600"), {}, stop_event, report, print)
    assert status == 130
    assert "Ctrl-C again" in lines[0]


def test_under_nohup_a_hangup_does_not_stop_the_cluster() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with cluster._stop_on_signals() as stop_event:
            signal.raise_signal(signal.SIGHUP)
            assert not stop_event.is_set()
            signal.raise_signal(signal.SIGTERM)
            assert stop_event.is_set()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)


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
