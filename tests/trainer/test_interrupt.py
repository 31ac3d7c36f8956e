"""Ctrl-C and SIGTERM: once finishes the step and saves, twice stops at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hone import cli
from hone.controller.failures import ClusterFailed
from hone.trainer.command_line import compose_arguments, run_program
from hone.trainer.interrupt import SIGNAL_NAMES, GracefulStop, Interrupted
from hone.trainer.ppo.trainer import PPOTrainer

from .runs import Run, Task, start


@pytest.fixture
def interrupted_in_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def arrange(step: int, times: int, number: int = signal.SIGINT) -> None:
        score = PPOTrainer.score

        def presses(self: Any, *arguments: Any, **keywords: Any) -> Any:
            if self.global_step == step:
                for _ in range(times):
                    os.kill(os.getpid(), number)
            return score(self, *arguments, **keywords)

        monkeypatch.setattr(PPOTrainer, "score", presses)

    return arrange


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_once_finishes_the_step_saves_and_exits_with_the_signals_code(
    train: Callable[..., Run],
    interrupted_in_step: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    number: int,
    code: int,
) -> None:
    four = "trainer.total_training_steps=4"
    uninterrupted = train(four, folder="whole")
    interrupted_in_step(2, 1, number)
    with pytest.raises(Interrupted) as caught:
        train(four)
    assert caught.value.code == code
    run = Run(tmp_path / "run")
    assert [line["step"] for line in run.metrics] == [1, 2]
    assert run.checkpoints() == ["global_step_2"]
    monkeypatch.undo()
    assert train(four).numbers == uninterrupted.numbers


@pytest.mark.parametrize("times", [0, 1])
def test_a_process_lost_after_a_requested_stop_ends_the_run_without_a_restart(
    train: Callable[..., Run],
    interrupted_in_step: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    times: int,
) -> None:
    def lose(self: Any, batch: Any) -> Any:
        raise ClusterFailed("it has ended", "actor", "update_actor", "do x")

    interrupted_in_step(1, times, signal.SIGTERM)
    monkeypatch.setattr(PPOTrainer, "update", lose)
    with pytest.raises(ClusterFailed) as caught:
        train()
    assert caught.value.may_restart == (times == 0)


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_twice_stops_at_once(
    train: Callable[..., Run],
    interrupted_in_step: Callable[..., None],
    tmp_path: Path,
    number: int,
    raised: type[BaseException],
) -> None:
    interrupted_in_step(2, 2, number)
    with pytest.raises(raised) as caught:
        train("trainer.total_training_steps=4")
    assert getattr(caught.value, "code", 143) == 143
    run = Run(tmp_path / "run")
    assert [line["step"] for line in run.metrics] == [1]
    assert run.checkpoints() == []


def test_the_handlers_of_before_come_back(train: Callable[..., Run]) -> None:
    before = [signal.getsignal(number) for number in SIGNAL_NAMES]
    train()
    assert [signal.getsignal(number) for number in SIGNAL_NAMES] == before


def test_a_rank_counts_any_number_of_signals_as_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with GracefulStop() as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert stop.signal_number == signal.SIGTERM


def test_ranks_agree_on_a_signal_that_one_of_them_got() -> None:
    stop = GracefulStop()
    stop.sync_ranks(lambda *asked: [0.0 for _ in asked])
    assert not stop.is_requested
    stop.sync_ranks(lambda *asked: [0.0, 1.0])
    assert stop.signal_number == signal.SIGTERM


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_before_the_first_step_a_signal_ends_the_program_through_its_clean_up(
    number: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    cleaned: list[bool] = []

    def program() -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(30)
        finally:
            cleaned.append(True)

    assert run_program(program) == code
    assert cleaned == [True]
    assert capsys.readouterr().err.startswith("stopped at once by ")


STUBBORN = """
import asyncio, os, signal, sys
from hone import cli
from hone.trainer.command_line import compose_arguments, run_program
from hone.trainer.interrupt import GracefulStop

async def step():
    try:
        os.kill(os.getpid(), int(sys.argv[1]))
        await asyncio.sleep(0.01)
        os.kill(os.getpid(), int(sys.argv[1]))
        await asyncio.sleep(60)
    except BaseException:
        await asyncio.sleep(60)

def main():
    with GracefulStop():
        asyncio.run(step())

sys.exit(run_program(main))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_twice_ends_a_program_that_catches_everything(number: int, code: int) -> None:
    command = [sys.executable, "-c", STUBBORN, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code
    assert done.stderr.splitlines()[-1].startswith("stopped at once by ")
    assert "Traceback" not in done.stderr


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


@pytest.mark.parametrize(
    ("times", "line"),
    [
        (
            1,
            "stopped by Ctrl-C; {run}/global_step_3 is saved, and the same command goes on from there",
        ),
        (0, ""),
    ],
)
def test_a_stopped_run_says_what_is_saved_and_how_to_go_on(
    task: Task,
    interrupted_in_step: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    times: int,
    line: str,
) -> None:
    run = tmp_path / "run"
    interrupted_in_step(3, times)
    overrides = task.overrides(run, "trainer.total_training_steps=4", "trainer.save_freq=2")
    assert cli.main(["train", *overrides]) == (130 if times else 0)
    assert capsys.readouterr().err.splitlines()[-1:] == ([line.format(run=run)] if line else [])


@pytest.mark.parametrize(
    ("made", "setting", "words"),
    [
        ((), "", "nothing is saved yet, and the same command starts anew"),
        ((2, 10), "", "run/global_step_10 is saved, and the same command goes on from there"),
        (
            (2,),
            "trainer.resume_mode=disable",
            "run/global_step_2 is saved, and trainer.resume_mode=auto goes on from there",
        ),
    ],
)
def test_a_run_that_is_stopped_at_once_says_what_is_saved(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    made: tuple[int, ...],
    setting: str,
    words: str,
) -> None:
    for step in made:
        (tmp_path / "run" / f"global_step_{step}").mkdir(parents=True)
    overrides = [f"trainer.default_local_dir={tmp_path}/run", *([setting] if setting else [])]

    def program() -> None:
        compose_arguments(overrides, schema="ppo_trainer", program="hone train")
        raise KeyboardInterrupt

    assert run_program(program) == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stopped at once by Ctrl-C; ")
    assert line.endswith(words)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ("generation", "finished responses are kept, and the same command generates"),
        ("evaluation", "nothing was written"),
    ],
)
def test_generation_and_evaluation_say_what_they_have_kept(
    capsys: pytest.CaptureFixture[str], tree: str, words: str
) -> None:
    def program() -> None:
        compose_arguments([], schema=tree, program="hone")
        raise KeyboardInterrupt

    assert run_program(program) == 130
    assert words in capsys.readouterr().err
