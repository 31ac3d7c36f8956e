"""Fixtures that run each attack as the user of the tests and as uid 65534."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hone.sandbox import SandboxResult, Status, client, layers

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
RunPython = Callable[..., SandboxResult]


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """A temporary folder that uid 65534 can read, unlike pytest's own."""
    system = Path(tempfile.gettempdir())
    for folder in (tmp_path, *tmp_path.parents):
        if system in folder.parents:
            folder.chmod(0o755)
    return tmp_path


@pytest.fixture(scope="session")
def bwrap() -> None:
    """Skips the test if bubblewrap does not work on this machine."""
    state = layers()["bubblewrap"]
    if not state.active:
        pytest.skip(f"bubblewrap does not work here: {state.detail}")


class NobodyRunner:
    """A process that runs as uid 65534 and calls run_python for the tests."""

    def __init__(self, python: str) -> None:
        self.process = subprocess.Popen(
            [python, str(Path(__file__).with_name("serve_runs.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            cwd="/",
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HONE_SECRET": "planted-secret"},
        )

    def ask(self, request: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def run(self, code: str, **limits: Any) -> SandboxResult:
        raw = self.ask({"code": code, **limits})
        return SandboxResult(**{**raw, "status": Status(raw["status"])})

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


@pytest.fixture(scope="session")
def nobody(bwrap: None) -> Iterator[NobodyRunner]:
    if os.geteuid() != 0:
        pytest.skip("only root can become uid 65534")
    for python in (sys.executable, "/usr/bin/python3"):
        command = [python, "-c", "import sys; sys.path.insert(0, sys.argv[1]); import hone.sandbox"]
        try:
            process = subprocess.run(
                [*command, str(ROOT)], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", env={}
            )
        except OSError:
            continue
        if process.returncode == 0:
            break
    else:
        pytest.skip("uid 65534 can reach no Python that imports hone")
    runner = NobodyRunner(python)
    yield runner
    runner.close()


@pytest.fixture(params=["own user", "uid 65534"])
def run(request: pytest.FixtureRequest, bwrap: None, monkeypatch: pytest.MonkeyPatch) -> RunPython:
    """run_python, in this process and in one of uid 65534."""
    if request.param == "uid 65534":
        runner: NobodyRunner = request.getfixturevalue("nobody")
        return runner.run
    from hone.sandbox import run_python

    monkeypatch.setenv("HONE_SECRET", "planted-secret")
    client.close()  # a new warden starts with the planted variable in its environment
    return run_python
