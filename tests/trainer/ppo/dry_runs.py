"""Dry runs of a task: what can be known before a model loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hone.trainer import main_ppo
from hone.trainer.ppo.preflight import PreflightError
from hone.trainer.ppo.trainer import PPOTrainer
from hone.verl.dialect import load_config

from ..runs import Task, task_row

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
TOOL_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"


@pytest.fixture(autouse=True)
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: PPOTrainer) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(PPOTrainer, "init_workers", refuse)


def dry_run(task: Task, folder: Path, *overrides: str) -> None:
    main_ppo.run(load_config(task.overrides(folder, *overrides)), dry_run=True)


def problems_of(task: Task, folder: Path, *overrides: str) -> list[str]:
    with pytest.raises(PreflightError) as caught:
        dry_run(task, folder, *overrides)
    return caught.value.problems


def write_rows(file: Path, **changes: Any) -> str:
    rows = [task_row(i, i, **changes) for i in range(6)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.train_files={file}"
