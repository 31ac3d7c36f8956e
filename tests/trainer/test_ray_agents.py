"""Rows of different agent loops, shared out over two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .runs import Run, Task, task_row

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

TOOLS = '''
from hone.agents.tools.function_tool import function_tool


@function_tool
def add(a: str) -> str:
    """Add.

    Args:
        a: what to add
    """
    return a
'''


def test_two_ranks_share_trajectories_of_several_rows(task: Task, tmp_path: Path) -> None:
    """Two updates per step over 8 trajectories and a number of rows that two ranks do not divide."""
    shared = [
        "actor_rollout_ref.rollout.agent.default_agent_loop=trainer.ppo.loops:Summarises",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "algorithm.adv_estimator=gae",
        "trainer.total_training_steps=2",
        "data.shuffle=false",
    ]
    ranks = {"one": [], "two": ["trainer.controller=ray", "trainer.n_gpus_per_node=2"]}
    one, two = (
        Run(tmp_path / name).train(task.overrides(tmp_path / name, *shared, *more))
        for name, more in ranks.items()
    )
    assert len(one.rollouts(1)) % 2
    names = ("trajectory_rows/mean", "actor/pg_loss", "actor/grad_norm", "critic/vf_loss")
    for name in (*names, "critic/returns/mean"):
        assert two.series(name) == pytest.approx(one.series(name), rel=1e-3, abs=1e-5), name


def test_two_ranks_with_different_loops_have_the_metrics_of_one(task: Task, tmp_path: Path) -> None:
    """The first half of each batch calls tools and says so in columns of its own."""
    (tmp_path / "tools.py").write_text(TOOLS)
    loops = ["tool_agent", "tool_agent", "single_turn_agent", "single_turn_agent"]
    rows = [task_row(i, 7 * i, agent_name=loops[i % 4]) for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixed = Task(task.model, tmp_path / "rows.jsonl", task.test, task.rewards)
    shared = [
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={tmp_path / 'tools.py'}",
        "data.max_prompt_length=400",
        "data.shuffle=false",
        "data.train_batch_size=4",
        "trainer.total_training_steps=1",
    ]
    ranks = {"one": [], "two": ["trainer.controller=ray", "trainer.n_gpus_per_node=2"]}
    one, two = (
        Run(tmp_path / name).train(mixed.overrides(tmp_path / name, *shared, *more))
        for name, more in ranks.items()
    )
    for name in ("tool_call_counts/max", "actor/pg_loss", "actor/grad_norm"):
        assert two.series(name) == pytest.approx(one.series(name), rel=1e-4, abs=1e-6), name
    tool_outputs = [[row["tool_outputs"] for row in run.rollouts(1)] for run in (one, two)]
    assert sorted(map(str, tool_outputs[0])) == sorted(map(str, tool_outputs[1]))
