"""What can be known before a model loads is told then, all at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hone import cli
from hone.tracking import TrackerError

from ..runs import Task
from .dry_runs import MULTI_TURN, TOOL_LOOP, dry_run, no_models, problems_of  # noqa: F401


def test_every_problem_is_told_at_once_with_exit_code_2(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = tmp_path / "tools.yaml"
    tools.write_text("tools:\n  - class_name: no_such_package.Tool\n    config: {}\n")
    overrides = ("data.max_prompt_length=2", f"{MULTI_TURN}.tool_config_path={tools}", TOOL_LOOP)
    assert cli.main(["train", "--dry-run", *task.overrides(tmp_path / "run", *overrides)]) == 2
    output = capsys.readouterr().err
    assert "prompts have more than data.max_prompt_length=2 tokens, the longest" in output
    assert "no_such_package" in output


def test_a_response_that_exceeds_the_positions_of_the_model_is_refused_with_what_fits(
    task: Task, tmp_path: Path
) -> None:
    (problem,) = problems_of(task, tmp_path, "data.max_response_length=10000")
    assert "positions; use data.max_response_length=" in problem
    fits = int(problem.rpartition("data.max_response_length=")[2].split()[0])
    dry_run(task, tmp_path / "run", f"data.max_response_length={fits}")


@pytest.mark.parametrize("prompt_tokens_left", [1, 0, -1_000_000])
def test_a_response_that_leaves_no_room_for_the_prompts_is_blamed(
    task: Task, tmp_path: Path, prompt_tokens_left: int
) -> None:
    positions = json.loads((task.model / "config.json").read_text())["max_position_embeddings"]
    lengths = (positions - prompt_tokens_left, max(1, prompt_tokens_left))
    keys = ("data.max_response_length", "data.max_prompt_length")
    overrides = [f"{key}={length}" for key, length in zip(keys, lengths, strict=True)]
    (problem,) = problems_of(task, tmp_path, *overrides)
    assert f"data.max_response_length={lengths[0]} exceed the model's" in problem
    assert "raise it" not in problem


def test_a_tracker_without_its_package_is_refused_before_a_model_loads(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TrackerError, match=r"pip install 'hone-rl\[wandb\]'"):
        dry_run(task, tmp_path / "run", "trainer.logger=[console,wandb]")


def test_positions_that_the_user_raises_count(task: Task, tmp_path: Path) -> None:
    key = "actor_rollout_ref.model.override_config.max_position_embeddings"
    dry_run(task, tmp_path / "run", "data.max_response_length=10000", f"{key}=20000")


def test_a_curriculum_without_a_rule_is_said(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ("reward_model.enable=true", f"reward_model.model.path={task.model}")
    blank = ("reward_model.type=judge", "reward_model.reward_manager=blank")
    dry_run(task, tmp_path / "run", "curriculum_learning.enable=true", *model, *blank)
    assert "curriculum learning removes no group unless the agent loop" in capsys.readouterr().out


def test_prompts_that_are_truncated_are_not_too_long(task: Task, tmp_path: Path) -> None:
    dry_run(task, tmp_path / "run", "data.max_prompt_length=2", "data.truncation=left")


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
    overrides = (f"algorithm.adv_estimator={estimator}", f"actor_rollout_ref.rollout.n={n}")
    dry_run(task, tmp_path / "run", *overrides)
    message = f"algorithm.adv_estimator={estimator} compares the responses of one prompt"
    assert (message in capsys.readouterr().out) is warned


def test_mistakes_of_all_parts_are_told_at_once(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("")
    (tmp_path / "bad.jsonl").write_text("{}\n")
    overrides = (
        f"actor_rollout_ref.model.path={tmp_path}/nowhere",
        f"data.train_files={tmp_path}/bad.jsonl",
        f"data.val_files={tmp_path}/absent.parquet",
        f"custom_reward_function.path={tmp_path}/absent.py",
        f"trainer.default_local_dir={tmp_path}/taken",
    )
    for flags in (["--dry-run"], []):
        assert cli.main(["train", *flags, *task.overrides(tmp_path / "run", *overrides)]) == 2
        output = capsys.readouterr().err
        assert output.startswith("PreflightError: 5 problems\n- trainer.default_local_dir=")
        assert f"trainer.default_local_dir={tmp_path}/taken is a file" in output
        assert f"actor_rollout_ref.model.path={tmp_path}/nowhere: model path" in output
        assert "bad.jsonl, row 0: column 'prompt' (data.prompt_key) is missing" in output
        assert "absent.parquet does not exist" in output
        assert f"no such file: '{tmp_path}/absent.py'" in output


def test_a_reward_model_that_cannot_score_stops_before_a_model_loads(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    enabled = ("reward_model.enable=true", f"reward_model.model.path={task.model}")
    with pytest.raises(ValueError, match=r"generates text and has no score head.*type=judge"):
        dry_run(task, tmp_path / "run", *enabled)
    judge = (*enabled, "reward_model.type=judge")
    with pytest.raises(ValueError, match=r"judge\.template='rate it' has no \{response\}"):
        dry_run(task, tmp_path / "run", *judge, "reward_model.judge.template='rate it'")
    server_overrides = (*judge, "reward_model.server.url=http://127.0.0.1:9")
    with pytest.raises(ValueError, match="api_key_env=NO_SUCH_KEY"):
        dry_run(
            task, tmp_path / "run", *server_overrides, "reward_model.server.api_key_env=NO_SUCH_KEY"
        )
    dry_run(task, tmp_path / "run", *judge)
    assert "cannot be reached" not in (output := capsys.readouterr()).out + output.err
    dry_run(task, tmp_path / "run", *server_overrides)
    output = capsys.readouterr()
    assert "server cannot be reached (http://127.0.0.1:9/v1/chat" in output.out + output.err
