"""What can be known before a model loads is told then, all at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hone import cli
from hone.config import load_config
from hone.trainer import main_ppo
from hone.trainer.ppo import preflight as preflight_module
from hone.trainer.ppo.preflight import PreflightError
from hone.trainer.ppo.trainer import PPOTrainer

from ..runs import Task, task_row

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
TOOL_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"
TOOLS = '''from hone.agents.tools.function_tool import function_tool

@function_tool
def echo(text: str) -> str:
    """Say it again.

    Args:
        text: what to say
    """
    return text
'''


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


def test_a_dry_run_says_what_would_run_and_leaves_no_folder(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.main(["train", "--dry-run", *task.overrides(tmp_path / "run", task.validated())]) == 0
    )
    said = capsys.readouterr().out
    assert "by grpo, 2 responses per prompt" in said
    assert "data.train_files: 24 prompts of" in said
    assert "2 steps of 4 prompts × 2 responses, 1 updates per step" in said
    assert "GiB per process" in said
    assert not (tmp_path / "run").exists()


def test_every_problem_is_told_at_once_with_exit_code_2(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ("data.max_prompt_length=2", f"{MULTI_TURN}.format=hermess", TOOL_LOOP)
    assert cli.main(["train", "--dry-run", *task.overrides(tmp_path / "run", *overrides)]) == 2
    told = capsys.readouterr().err
    assert "prompts have more than data.max_prompt_length=2 tokens, the longest" in told
    assert "agent loop 'tool_agent' cannot be built" in told
    assert "Did you mean 'hermes'?" in told


def test_a_response_that_exceeds_the_positions_of_the_model_is_refused_with_what_fits(
    task: Task, tmp_path: Path
) -> None:
    (problem,) = problems_of(task, tmp_path, "data.max_response_length=10000")
    assert "positions; use data.max_response_length=" in problem
    fits = int(problem.rpartition("data.max_response_length=")[2].split()[0])
    dry_run(task, tmp_path / "run", f"data.max_response_length={fits}")


def test_prompts_that_are_truncated_are_not_too_long(task: Task, tmp_path: Path) -> None:
    dry_run(task, tmp_path / "run", "data.max_prompt_length=2", "data.truncation=left")


def test_a_checkpoint_that_the_disk_cannot_hold_is_refused(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(preflight_module.shutil, "disk_usage", lambda place: usage)
    (problem,) = problems_of(task, tmp_path, "trainer.save_freq=-1")
    assert "a checkpoint takes about" in problem
    dry_run(task, tmp_path / "run", "trainer.save_freq=0")


def test_what_rows_ask_for_and_nothing_answers_is_said(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = {"interaction_kwargs": {"name": "nag"}, "tools_kwargs": {"calc": {"create_kwargs": {}}}}
    data = write_rows(tmp_path / "rows.jsonl", extra_info=extra, agent_name="tool_agent")
    dry_run(task, tmp_path / "run", data)
    said = capsys.readouterr().out
    assert "rows have interaction_kwargs, and no interaction is configured" in said
    assert "rows have tools_kwargs for calc, which is no tool of this run" in said
    assert "tool_agent has neither tools nor interactions" in said


@pytest.mark.parametrize(
    ("estimator", "n", "warned"),
    [("grpo", 1, True), ("opo", 1, True), ("grpo", 2, False), ("reinforce_plus_plus", 1, False)],
)
def test_an_estimator_over_groups_without_a_group_is_said(
    task: Task,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    estimator: str,
    n: int,
    warned: bool,
) -> None:
    chosen = (f"algorithm.adv_estimator={estimator}", f"actor_rollout_ref.rollout.n={n}")
    dry_run(task, tmp_path / "run", *chosen)
    said = f"algorithm.adv_estimator={estimator} compares the responses of one prompt"
    assert (said in capsys.readouterr().out) is warned


def test_a_template_that_does_not_show_the_tools_is_said(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mytools.py").write_text(TOOLS)
    dry_run(
        task, tmp_path / "run", TOOL_LOOP, f"{MULTI_TURN}.function_tool_path={tmp_path}/mytools.py"
    )
    assert "does not show the tools to the model" in capsys.readouterr().out


def test_an_interaction_that_is_not_configured_is_refused_by_name(
    task: Task, tmp_path: Path
) -> None:
    (tmp_path / "talk.yaml").write_text(
        "interaction:\n  - name: polite\n"
        "    class_name: hone.agents.interactions.gsm8k.Gsm8kInteraction\n    config: {}\n"
    )
    extra = {"interaction_kwargs": {"name": "nag"}}
    data = write_rows(tmp_path / "rows.jsonl", extra_info=extra)
    path = f"{MULTI_TURN}.interaction_config_path={tmp_path}/talk.yaml"
    (problem,) = problems_of(task, tmp_path / "run", data, TOOL_LOOP, path)
    assert "rows name the interaction 'nag'" in problem
    assert "it has polite" in problem


def test_prompts_are_measured_once_per_data_set(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hone.data.dataset import RLHFDataset

    measured: list[int] = []
    plain = RLHFDataset.prompt_tokens

    def counted(self: RLHFDataset, index: int) -> int:
        measured.append(index)
        return plain(self, index)

    monkeypatch.setattr(RLHFDataset, "prompt_tokens", counted)
    data = write_rows(tmp_path / "rows.jsonl", ability=str(tmp_path))
    for _ in range(2):
        dry_run(task, tmp_path / "run", data)
    assert measured == list(range(6))
    dry_run(task, tmp_path / "run", data, "data.max_prompt_length=15")
    assert len(measured) == 12
