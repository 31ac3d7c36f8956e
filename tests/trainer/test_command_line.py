"""A mistake or a failing disk is one sentence on the terminal; its traceback is kept in the run folder."""

from __future__ import annotations

import builtins
import errno
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hone import cli
from hone.config.sources import parse_overrides
from hone.tracking.lock import LOCK_NAME, Holder, _start_time
from hone.trainer.command_line import path_override

from .runs import Task


def test_a_loop_that_raises_is_one_sentence_and_its_traceback_lies_in_the_run_folder(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "from hone.experimental.agent_loop.agent_loop import AgentLoopBase\n"
        "class Loop(AgentLoopBase):\n"
        "    async def run(self, sampling_params, **row):\n"
        "        raise RuntimeError('no such city')\n"
    )
    loop = f"actor_rollout_ref.rollout.agent.default_agent_loop={tmp_path}/mine.py:Loop"
    run = tmp_path / "run"
    assert cli.main(["train", *task.overrides(run, loop)]) == 2
    output = capsys.readouterr().err
    assert "AgentLoopFailed: agent loop" in output
    assert "no such city" in output
    assert "Traceback" not in output
    assert f"the traceback is in {run}/error.log" in output
    assert "mine.py" in (run / "error.log").read_text()


@pytest.mark.parametrize("where", ["config", "rollouts", "validation", "metrics"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_anywhere_in_a_run_is_one_sentence(
    task: Task,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    number: int,
) -> None:
    sync, opened = os.fsync, open
    name = {"config": "config.yaml", "metrics": "metrics.jsonl"}.get(where, f"{where}/.step_1")

    def fails(handle: int) -> None:
        if name in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(number, os.strerror(number))
        sync(handle)

    def full(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if str(file).endswith(name) and mode == "ab":
            raise OSError(number, os.strerror(number), str(file))
        return opened(file, mode, *rest, **more)

    monkeypatch.setattr(os, "fsync", fails)
    monkeypatch.setattr(builtins, "open", full)
    overrides = task.overrides(tmp_path / "run", task.validated(), "trainer.test_freq=1")
    assert cli.main(["train", *overrides]) == 2
    printed = capsys.readouterr().err
    (message,) = (line for line in printed.splitlines() if line.startswith("OSError: the disk "))
    assert str(tmp_path / "run") in message
    assert "Traceback" not in printed
    left = [p.name for p in (tmp_path / "run").rglob("*") if p.name.endswith((".tmp", ".lock"))]
    assert left == []
    monkeypatch.undo()
    assert cli.main(["train", *overrides]) == 0


def test_a_folder_that_may_not_be_written_is_one_sentence(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", denied)
    assert cli.main(["train", *task.overrides(tmp_path / "run")]) == 2
    output = capsys.readouterr().err.strip().splitlines()
    assert f"PermissionError: Permission denied: {tmp_path / 'run'}" in output


def test_a_second_process_leaves_no_trace_in_a_folder_that_is_in_use(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *task.overrides(tmp_path / "run")]) == 0
    record = replace(
        Holder.of_this_process(), pid=os.getppid(), started=_start_time(os.getppid()) or ""
    )
    (tmp_path / "run" / LOCK_NAME).write_text(json.dumps(asdict(record)))
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert cli.main(["train", *task.overrides(tmp_path / "run")]) == 2
    assert "is in use by" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    "path", ["a b", "it's", "a,b", "[x]{y}", "a\\b", "a\\\\b", "a\\'b", "end\\", "a=b", "~/x"]
)
def test_an_override_keeps_every_character_of_a_path(path: str) -> None:
    (setting,) = parse_overrides([path_override("data.path", path)])
    assert (setting.key, setting.value) == ("data.path", path)
