"""A mistake is one sentence on the terminal; where it came from is kept in the run folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone import cli

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
    told = capsys.readouterr().err
    assert "AgentLoopFailed: agent loop" in told
    assert "no such city" in told
    assert "Traceback" not in told
    assert f"the traceback is in {run}/error.log" in told
    assert "mine.py" in (run / "error.log").read_text()
