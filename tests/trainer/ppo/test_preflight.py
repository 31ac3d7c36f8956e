"""What can be known before a model loads is told then, all at once."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from hone import cli
from hone.config import load_config
from hone.models.families import UnsupportedModel
from hone.trainer import main_ppo
from hone.trainer.ppo import preview as preview_module
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
    tools = tmp_path / "tools.yaml"
    tools.write_text("tools:\n  - class_name: no_such_package.Tool\n    config: {}\n")
    overrides = ("data.max_prompt_length=2", f"{MULTI_TURN}.tool_config_path={tools}", TOOL_LOOP)
    assert cli.main(["train", "--dry-run", *task.overrides(tmp_path / "run", *overrides)]) == 2
    told = capsys.readouterr().err
    assert "prompts have more than data.max_prompt_length=2 tokens, the longest" in told
    assert "no_such_package" in told


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
    monkeypatch.setattr(preview_module.shutil, "disk_usage", lambda place: usage)
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
    plain = RLHFDataset.prompt_lengths

    def counted(self: RLHFDataset) -> Any:
        measured.append(len(self))
        return plain(self)

    monkeypatch.setattr(RLHFDataset, "prompt_lengths", counted)
    data = write_rows(tmp_path / "rows.jsonl", ability=str(tmp_path))
    for _ in range(2):
        dry_run(task, tmp_path / "run", data)
    assert measured == [6]
    dry_run(task, tmp_path / "run", data, "data.max_prompt_length=15")
    assert measured == [6, 6]


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
        told = capsys.readouterr().err
        assert told.startswith("PreflightError: 5 problems\n- trainer.default_local_dir=")
        assert f"trainer.default_local_dir={tmp_path}/taken is a file" in told
        assert f"actor_rollout_ref.model.path={tmp_path}/nowhere: model path" in told
        assert "bad.jsonl, row 0: column 'prompt' (data.prompt_key) is missing" in told
        assert "absent.parquet does not exist" in told
        assert f"no such file: '{tmp_path}/absent.py'" in told


def scorer(folder: Path, body: str) -> str:
    file = folder / "scorer.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        + "".join(f"    {line}\n" for line in body.splitlines())
    )
    return f"custom_reward_function.path={file}"


@pytest.mark.parametrize("manager", ["naive", "prime", "batch"])
def test_the_scorer_is_called_where_it_will_run(task: Task, tmp_path: Path, manager: str) -> None:
    calls = tmp_path / "calls"
    body = (
        f"import os\nwith open({str(calls)!r}, 'a') as file:\n"
        "    file.write(f'{os.getpid()} {solution_str} {ground_truth}\\n')\nreturn 0"
    )
    if manager == "batch":
        (tmp_path / "scorer.py").write_text(
            "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
            f"    open({str(calls)!r}, 'a').write(f'0 {{solution_strs[0]}} {{ground_truths[0]}}\\n')\n"
            "    return [0] * len(solution_strs)\n"
        )
        given = f"custom_reward_function.path={tmp_path}/scorer.py"
    else:
        given = scorer(tmp_path, body)
    chosen = f"reward_model.reward_manager={manager}"
    dry_run(task, tmp_path / "run", given, chosen, "reward_model.reward_kwargs.num_processes=1")
    (line,) = calls.read_text().splitlines()
    process, response, truth = line.split()
    assert response == truth == "0"
    assert (process != str(os.getpid())) is (manager != "naive")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", "scorer.py raised ZeroDivisionError: division by zero at"),
        ("return undefined", "scorer.py raised NameError: name 'undefined' is not defined at"),
        ("return 'good'", "scorer.py:1: text ('good'), not a number"),
        ("return float('nan')", "scorer.py:1: the score is NaN"),
        ("return {'accuracy': 1}", "scorer.py:1: a dict without 'score': keys"),
    ],
)
def test_a_scorer_that_can_never_work_is_refused_with_its_line(
    task: Task, tmp_path: Path, body: str, message: str
) -> None:
    (problem,) = problems_of(task, tmp_path / "run", scorer(tmp_path, body))
    assert "train.jsonl, row 0 (data_source 'lexical') cannot be scored, whatever the" in problem
    assert message in problem


@pytest.mark.parametrize(
    "body",
    [
        "return float(solution_str.split('<answer>')[1].split('<')[0] == ground_truth)",
        "return float(solution_str.split('####')[1].strip() == ground_truth)",
        "import json\nreturn float(json.loads(solution_str)['answer'] == ground_truth)",
        "return 0.0",
        "return 1 / len(solution_str)",
    ],
)
def test_a_scorer_that_works_on_some_text_is_taken_in_silence(
    task: Task, tmp_path: Path, body: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dry_run(task, tmp_path / "run", scorer(tmp_path, body))
    assert "score function" not in capsys.readouterr().out


def test_a_scorer_that_parses_a_form_of_its_own_is_warned_of(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dry_run(task, tmp_path / "run", scorer(tmp_path, "return len(solution_str.split('@@')[1])"))
    said = capsys.readouterr().out
    assert "the score function failed on" in said
    assert "IndexError: list index out of range" in said
    assert f"{tmp_path}/scorer.py:2; such a response scores 0" in said


def test_rows_without_a_ground_truth_are_refused_or_counted(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = "custom_reward_function.path=null"
    bare = {"style": "rule", "ground_truth": None}
    data = write_rows(tmp_path / "bare.jsonl", data_source="openai/gsm8k", reward_model=bare)
    (problem,) = problems_of(task, tmp_path / "run", data, plain)
    assert "bare.jsonl, row 0 (data_source 'openai/gsm8k') cannot be scored" in problem
    assert "reward_model.ground_truth is None" in problem
    rows = [task_row(i, i, data_source="openai/gsm8k") for i in range(6)]
    rows[4]["reward_model"]["ground_truth"] = ""
    some = tmp_path / "some.jsonl"
    some.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = (f"data.train_files={some}", plain)
    dry_run(task, tmp_path / "run", *given)
    assert "1 of 6 rows have no reward_model.ground_truth" in capsys.readouterr().out
    raising = "reward_model.reward_kwargs.on_failure=raise"
    (problem,) = problems_of(task, tmp_path / "run", *given, raising)
    assert "some.jsonl, row 4" in problem


def test_a_folder_without_weights_is_refused_before_models_load(task: Task, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(task.model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(UnsupportedModel, match=r"it has config\.json and no weights"):
        dry_run(task, tmp_path / "run", f"actor_rollout_ref.model.path={bare}")
    weights = next(task.model.glob("*.safetensors"))
    (bare / weights.name).write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UnsupportedModel, match="is truncated or damaged"):
        dry_run(task, tmp_path / "run", f"actor_rollout_ref.model.path={bare}")
