"""One node of a launched cluster, with a stand-in for `ray start`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from hone.launch import node
from hone.launch.node import NodeSettings

PROGRAM = """
from hone.launch import node
node.start_ray = lambda *_: node.NodeStatus("here:1", "http://127.0.0.1:1", "t")
node.main()
"""


def test_a_head_names_its_process_and_sigterm_leaves_nothing(tmp_path: Path) -> None:
    places = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | places,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as head:
        assert head.stdin is not None
        assert head.stdout is not None
        head.stdin.write(json.dumps(asdict(NodeSettings(mark="m", token="t"))) + "\n")
        head.stdin.flush()
        assert json.loads(head.stdout.readline())["address"] == "here:1"
        cluster = json.loads((tmp_path / ".hone/launch/m/head/cluster.json").read_text())
        assert (cluster["host"], cluster["pid"]) == (socket.gethostname(), head.pid)
        head.send_signal(signal.SIGTERM)
        assert head.wait(60) == 143
    assert list((tmp_path / ".hone" / "launch").iterdir()) == []
    assert list(tmp_path.glob("hone-ray-*")) == []


@pytest.mark.parametrize("head", ["", "here:1"])
def test_every_node_keeps_the_files_of_ray_in_its_own_folder(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    given: list[str] = []
    stand_in = SimpleNamespace(main=lambda words, standalone_mode: given.extend(words))
    monkeypatch.setattr("ray.scripts.scripts.start", stand_in)
    monkeypatch.setattr(node, "_wait_until_reachable", lambda address: None)
    node.start_ray(NodeSettings(mark="m", token="t", head=head), tmp_path / "token", "/tmp/session")
    assert given.count("--temp-dir=/tmp/session/ray") == 1
    assert (f"--address={head}" in given) is bool(head)


def test_a_raylet_that_fails_is_quoted_before_its_log_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text(
        "[C] a bug in Ray. Check failed: x.ok() Timed out\n*** Stack\n"
    )

    def failing(*_: object) -> node.NodeStatus:
        raise RuntimeError("the current node timed out")

    monkeypatch.setattr(node, "start_ray", failing)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "before")
    answers: list[node.NodeStatus] = []
    folder, before = tmp_path / "folder", dict(os.environ)
    try:
        node.run_node(NodeSettings(mark="m", token="t"), folder, str(tmp_path), answers.append)
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert answers[0].error.endswith("timed out\nits raylet: x.ok() Timed out")
