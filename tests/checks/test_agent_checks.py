"""What rows ask of their agent loops is checked before a model loads: loops, tools, interactions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.ppo.dry_runs import (  # noqa: F401
    MULTI_TURN,
    TOOL_LOOP,
    dry_run,
    no_models,
    problems_of,
    write_rows,
)
from tests.trainer.runs import Task, task_row

TOOLS = '''from hone.agents.tools.function_tool import function_tool

@function_tool
def echo(text: str) -> str:
    """Say it again.

    Args:
        text: what to say
    """
    return text
'''


def test_what_rows_ask_for_and_nothing_answers_is_said(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = {"interaction_kwargs": {"name": "nag"}, "tools_kwargs": {"calc": {"create_kwargs": {}}}}
    data = write_rows(tmp_path / "rows.jsonl", extra_info=extra, agent_name="tool_agent")
    dry_run(task, tmp_path / "run", data)
    output = capsys.readouterr().out
    assert "rows have interaction_kwargs, but no interaction is configured" in output
    assert "rows have tools_kwargs for calc, but this run has no such tool" in output
    assert "tool_agent has neither tools nor interactions" in output


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


@pytest.mark.parametrize(
    ("columns", "settings", "why"),
    [
        ({"tool_config": {"available_tools": ["rm"]}}, [], "names 'rm'; the tools of this run are"),
        ({}, ["reward_model.turn_reward_coef.rm=1.0"], "no tool or interaction of this run has"),
    ],
)
def test_tools_that_the_run_does_not_have_are_refused_before_models_load(
    task: Task, tmp_path: Path, columns: dict[str, Any], settings: list[str], why: str
) -> None:
    (tmp_path / "mytools.py").write_text(TOOLS)
    data = write_rows(tmp_path / "rows.jsonl", **columns)
    path = f"{MULTI_TURN}.function_tool_path={tmp_path}/mytools.py"
    (problem,) = problems_of(task, tmp_path / "run", data, TOOL_LOOP, path, *settings)
    assert why in problem


def test_a_template_that_drops_earlier_thinking_is_said_before_training(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "talk.yaml").write_text(
        "interaction:\n  - name: gsm8k\n"
        "    class_name: hone.agents.interactions.gsm8k.Gsm8kInteraction\n"
    )
    template = (
        "{% for m in messages %}{{ m.role[0] + ':' + m.content.split('</think>')[-1] + ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    (tmp_path / "template.jinja").write_text(template)
    dry_run(
        task,
        tmp_path / "run",
        TOOL_LOOP,
        "data.prompt_format=chat",
        f"{MULTI_TURN}.interaction_config_path={tmp_path}/talk.yaml",
        f"actor_rollout_ref.model.custom_chat_template={template!r}",
    )
    output = " ".join(capsys.readouterr().out.split())
    assert "renders earlier turns differently than the model wrote them" in output
    assert "a user answers a turn that thinks: from token" in output, output


REACT = "actor_rollout_ref.rollout.agent.default_agent_loop=react_agent"


def tool_file(folder: Path) -> str:
    (folder / "mytools.py").write_text(TOOLS)
    return f"{MULTI_TURN}.function_tool_path={folder}/mytools.py"


def test_what_a_loop_puts_before_the_prompt_counts_before_models_load(
    task: Task, tmp_path: Path
) -> None:
    (problem,) = problems_of(task, tmp_path / "run", REACT, tool_file(tmp_path))
    assert "24 of 24 prompts have more than data.max_prompt_length=16 tokens" in problem
    dry_run(task, tmp_path / "run", REACT, tool_file(tmp_path), "data.max_prompt_length=900")


def test_the_length_filter_counts_a_loops_instructions_row_by_row(
    task: Task, tmp_path: Path
) -> None:
    """Rows of two loops and of both formats, with prompts of one length: those with instructions go."""
    from hone.trainer.ppo.preflight import prepare
    from hone.verl.dialect import load_config

    plain = {"tool_config": {"tool_format": "function_calling"}}
    empty = {"tool_config": {"available_tools": []}}
    kinds: list[dict[str, Any]] = [
        {"agent_name": "react_agent"},
        {"agent_name": "react_agent", "extra_info": {"index": 1, **empty}},
        {"agent_name": "react_agent", **plain},
        {"agent_name": "single_turn_agent"},
        {"agent_name": "tool_agent", "tool_config": {"tool_format": "react"}},
        {},
    ]
    rows = [task_row(i, 5, **kind) for i, kind in enumerate(kinds * 2)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        tool_file(tmp_path),
        f"data.train_files={file}",
        "data.filter_overlong_prompts=true",
    ]
    trainer, _ = prepare(load_config(task.overrides(tmp_path / "run", *overrides)))
    indices = [row["extra_info"]["index"] for row in map(trainer.train_dataset.raw_row, range(8))]
    assert len(trainer.train_dataset) == 8
    assert [index % 6 for index in indices] == [1, 2, 3, 5, 1, 2, 3, 5]


def test_the_filter_leaves_the_same_rows_when_a_run_resumes(task: Task, tmp_path: Path) -> None:
    """The fingerprint that a checkpoint compares is that of the rows that remain."""
    from hone.trainer.ppo.preflight import prepare
    from hone.verl.dialect import load_config

    rows = [task_row(i, 5, prompt="1" * (1 + 40 * (i % 2))) for i in range(12)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        REACT,
        tool_file(tmp_path),
        f"data.train_files={file}",
        "data.filter_overlong_prompts=true",
        "data.max_prompt_length=900",
    ]
    config = load_config(task.overrides(tmp_path / "run", *overrides))
    trainer, _ = prepare(config)
    dataset = trainer.train_dataset
    longest = max(n for n in dataset.prompt_lengths() if isinstance(n, int))
    overrides[-1] = f"data.max_prompt_length={longest - 1}"
    trainer, _ = prepare(load_config(task.overrides(tmp_path / "run", *overrides)))
    assert len(trainer.train_dataset) == 6
    assert trainer.train_dataset.fingerprint != dataset.fingerprint
    repeated, _ = prepare(load_config(task.overrides(tmp_path / "run", *overrides)))
    assert repeated.train_dataset.fingerprint == trainer.train_dataset.fingerprint


def test_prompts_that_are_too_long_with_their_tools_are_one_of_several_problems(
    task: Task, tmp_path: Path
) -> None:
    from hone.trainer.ppo.preflight import PreflightError, prepare
    from hone.verl.dialect import load_config

    overrides = [
        REACT,
        tool_file(tmp_path),
        "data.filter_overlong_prompts=true",
        "data.max_prompt_length=40",
        "actor_rollout_ref.rollout.n=2",
        "custom_reward_function.name=nowhere",
    ]
    with pytest.raises(PreflightError, match=r"data.max_prompt_length=40(.|\n)*nowhere"):
        prepare(load_config(task.overrides(tmp_path / "run", *overrides)))


def test_an_environment_that_cannot_be_made_is_refused_before_models_load(
    task: Task, tmp_path: Path
) -> None:
    (tmp_path / "env.py").write_text(
        "class Maze:\n"
        "    def __init__(self, size):\n        self.size = 1 / size\n"
        "    def reset(self): return ''\n    def step(self, text): return '', 0.0, True\n"
    )
    listed = "interaction:\n" + "".join(
        f"  - name: maze{size}\n    class_name: {tmp_path}/env.py:Maze\n    config: {{size: {size}}}\n"
        for size in (0, 5)
    )
    (tmp_path / "envs.yaml").write_text(listed)
    path = f"{MULTI_TURN}.interaction_config_path={tmp_path}/envs.yaml"
    (problem,) = problems_of(task, tmp_path / "run", TOOL_LOOP, path)
    assert "the environment maze0 cannot be made: ZeroDivisionError" in problem


@pytest.mark.parametrize("role", ["tool", "user"])
def test_a_template_that_cannot_render_later_turns_is_refused_before_models_load(
    task: Task, tmp_path: Path, role: str
) -> None:
    template = (
        "{% for m in messages %}{% if loop.index0 and m.role == '" + role + "' %}"
        "{{ raise_exception('no turn of ' + m.role) }}{% endif %}{{ m.role[0] + ':' + m.content + ' ' }}"
        "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    (tmp_path / "talk.yaml").write_text(
        "interaction:\n  - name: gsm8k\n"
        "    class_name: hone.agents.interactions.gsm8k.Gsm8kInteraction\n"
    )
    talk = f"{MULTI_TURN}.interaction_config_path={tmp_path}/talk.yaml"
    (problem,) = problems_of(
        task,
        tmp_path / "run",
        TOOL_LOOP,
        "data.prompt_format=chat",
        tool_file(tmp_path) if role == "tool" else talk,
        f"actor_rollout_ref.model.custom_chat_template={template!r}",
    )
    assert f"cannot render a turn of {role}" in problem
