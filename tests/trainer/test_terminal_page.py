"""docs/terminal.md shows captured lines: a run of now must print lines of the same shape."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from .runs import Run, Task

PAGE = Path(__file__).parents[2] / "docs" / "terminal.md"
FOLDERS = ("runs/sums", "quickstart/seed-1/run")
CHECKED = ("step ", "done ", "look ", "resumed ", "watch ", "see ")


def shape(line: str, *folders: str) -> str:
    """A line without its numbers, paths and data sets."""
    for folder in folders:
        line = line.replace(folder, "RUN")
    line = re.sub(r"\d[\d,.:]*(e-?\d+)?", "#", re.sub(r"val-core/\S+", "VAL", line))
    return re.sub(r"(VAL # · )+VAL #", "VAL #", line)


def captured() -> list[str]:
    blocks = re.findall(r"```\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith(CHECKED)]


@pytest.mark.slow
def test_a_run_and_its_resumption_print_the_lines_of_the_page(
    train: Callable[..., Run], task: Task, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (
        "custom_reward_function.name=detailed",
        "trainer.logger=[console,tensorboard]",
        "trainer.save_freq=1",
        "trainer.test_freq=3",
    )
    run = train(*settings)
    train(*settings, task.validated(), "trainer.total_training_steps=4")
    train(*settings, task.validated(), "trainer.total_training_steps=1", folder="first")
    printed = {shape(line, str(run.folder)) for line in capsys.readouterr().out.splitlines()}
    shown = {shape(line, *FOLDERS): line for line in captured()}
    assert len(shown) >= 9
    assert [line for kind, line in shown.items() if kind not in printed] == []
