"""Ctrl-C: once finishes the step and saves, twice stops at once."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hone.trainer.ppo.interrupt import Interrupted
from hone.trainer.ppo.trainer import PPOTrainer

from ..runs import Run, Task, start


@pytest.fixture
def interrupted_in_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    def arrange(step: int, times: int) -> None:
        score = PPOTrainer.score

        def presses(self: Any, *arguments: Any, **keywords: Any) -> Any:
            if self.global_step == step:
                for _ in range(times):
                    os.kill(os.getpid(), signal.SIGINT)
            return score(self, *arguments, **keywords)

        monkeypatch.setattr(PPOTrainer, "score", presses)

    return arrange


def test_once_finishes_the_step_saves_and_exits_130(
    train: Callable[..., Run],
    interrupted_in_step: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    four = "trainer.total_training_steps=4"
    whole = train(four, folder="whole")
    interrupted_in_step(2, 1)
    with pytest.raises(Interrupted) as caught:
        train(four)
    assert caught.value.code == 130
    run = Run(tmp_path / "run")
    assert [line["step"] for line in run.metrics] == [1, 2]
    assert run.checkpoints() == ["global_step_2"]
    monkeypatch.undo()
    assert train(four).numbers == whole.numbers


def test_twice_stops_at_once(
    train: Callable[..., Run],
    interrupted_in_step: Callable[[int, int], None],
    tmp_path: Path,
) -> None:
    interrupted_in_step(2, 2)
    with pytest.raises(KeyboardInterrupt):
        train("trainer.total_training_steps=4")
    run = Run(tmp_path / "run")
    assert [line["step"] for line in run.metrics] == [1]
    assert run.checkpoints() == []


def test_the_handler_of_before_comes_back(train: Callable[..., Run]) -> None:
    before = signal.getsignal(signal.SIGINT)
    train()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
@pytest.mark.parametrize("presses", [1, 2])
def test_a_real_ctrl_c_to_a_real_process(task: Task, tmp_path: Path, presses: int) -> None:
    process = start(task.overrides(tmp_path, "trainer.total_training_steps=100000"))
    metrics = tmp_path / "metrics.jsonl"
    try:
        deadline = time.monotonic() + 600
        while not metrics.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        for _ in range(presses):
            process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    if presses == 1:
        assert process.returncode == 130
        assert "stopping after this step" in output
        assert len(Run(tmp_path).checkpoints()) == 1
    else:
        assert process.returncode in (130, -signal.SIGINT)
