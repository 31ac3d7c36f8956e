"""Every kind of plug-in of docs/extend.md, named on the command line as the page says, in a real run."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from hone.tracking import read_metrics
from hone.trainer.main_ppo import main

from .trainer.runs import Task, make_task, task_row

PAGE = Path(__file__).resolve().parents[1] / "docs" / "extend.md"


@dataclass(frozen=True)
class Seam:
    """A section of the page: its files, and the settings that name them."""

    title: str
    files: dict[str, str]
    settings: list[str]

    @property
    def module(self) -> str:
        return next(name for name in self.files if name.endswith(".py"))


def seams() -> dict[str, Seam]:
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]
    found = {}
    for section in sections:
        title = section.partition("\n")[0]
        blocks = re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", section, flags=re.S)
        lines = re.findall(r"^`(\S+=[^`]*)`$", section, flags=re.M)
        assert blocks, f"{title} shows no file"
        assert lines, f"{title} shows no setting"
        found[title] = Seam(title, dict(blocks), lines[0].split())
    return found


SEAMS = seams()
KINDS = {
    "Advantage estimator", "Advantage estimator that reads columns", "Policy loss", "KL estimator",
    "Score function", "Reward manager", "Agent loop", "Tool", "Parser of tool calls", "Interaction",
    "Data set", "Online augmentation", "Sampler", "Tracker", "Optimizer", "Learning-rate schedule",
    "Rollout engine", "Training engine",
}  # fmt: skip

CALLED = {
    # the functions of each file that a run must have called
    "Advantage estimator": {"centred"},
    "Advantage estimator that reads columns": {"requires", "__call__"},
    "Policy loss": {"anchored"},
    "KL estimator": {"squared"},
    "Score function": {"compute_score"},
    "Reward manager": {"__call__"},
    "Agent loop": {"run"},
    "Tool": {"day_of_week"},
    "Parser of tool calls": {"calls"},
    "Interaction": {"generate_response"},
    "Data set": {"__getitem__"},
    "Online augmentation": {"generate"},
    "Sampler": {"__iter__"},
    "Tracker": {"log"},
    "Optimizer": {"step"},
    "Learning-rate schedule": {"halves"},
    "Rollout engine": {"__init__", "generate"},
    "Training engine": {"clipped_harder"},
}
BESIDE = {
    # a tool is called where a parser finds a call, and a parser is asked where there is a tool
    "Tool": ["Parser of tool calls"],
    "Parser of tool calls": ["Tool"],
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return make_task(tmp_path_factory.mktemp("task"))


@contextmanager
def calls_into(folder: Path) -> Iterator[set[tuple[str, str]]]:
    """(file, function) of every call of a function that is defined in a file of the folder."""
    seen: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(folder)):
            seen.add((Path(code.co_filename).name, code.co_name))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def test_the_page_shows_every_kind() -> None:
    assert SEAMS.keys() == KINDS
    assert CALLED.keys() == SEAMS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("title", SEAMS)
def test_a_part_of_ones_own_trains_as_the_page_names_it(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, title: str
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = []
    for seam in (SEAMS[title], *(SEAMS[name] for name in BESIDE.get(title, ()))):
        for name, text in seam.files.items():
            Path(name).write_text(text)
        settings += seam.settings
    rows = [task_row(i, i, interaction_kwargs={"name": "again"}) for i in range(8)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {setting.partition("=")[0] for setting in settings}
    usual = [o for o in task.overrides(tmp_path / "run") if o.partition("=")[0] not in given]
    with calls_into(tmp_path) as calls:
        main([*usual, "data.train_files=rows.jsonl", "data.max_response_length=24", *settings])
    called = {function for file, function in calls if file == SEAMS[title].module}
    assert called >= CALLED[title]
    lines = [line for line in read_metrics(tmp_path / "run") if "actor/grad_norm" in line]
    assert len(lines) == 2
