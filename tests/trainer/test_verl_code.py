"""A user's code for verl runs here under our name: one real run of loops, tools, data set and manager."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm

from .runs import Run

CODE = Path(__file__).with_name("verl_code.py")
LOOPS = f"""
- name: verl_single_turn
  _target_: {CODE}:SingleTurn
  counter: {{_target_: collections.Counter, start: 7}}
  limits: {{most: 5}}
- name: verl_tools
  _target_: {CODE}:Tools
"""
TOOLS = f"""
tools:
  - class_name: {CODE}:Echo
    config: {{type: native}}
    tool_schema: {{type: function, function: {{name: echo, description: Says it backwards.}}}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("verl")
    tokenizer = character_tokenizer()
    save_pretrained(tiny_lm(len(tokenizer), hidden=16, layers=1, mlp=16), tokenizer, folder / "m")
    (folder / "loops.yaml").write_text(LOOPS)
    (folder / "tools.yaml").write_text(TOOLS)
    rows = [
        {
            "data_source": "mine",
            "prompt": [{"role": "user", "content": f"{i}?"}],
            "reward_model": {"style": "rule", "ground_truth": "x"},
            "extra_info": {"index": i},
            "agent_name": ("verl_single_turn", "verl_tools")[i % 2],
        }
        for i in range(5)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    rollout = "actor_rollout_ref.rollout"
    return Run(folder / "run").train(
        [
            "algorithm.adv_estimator=grpo",
            f"data.train_files={folder}/rows.jsonl",
            "data.val_files=[]",
            "data.train_batch_size=4",
            "data.max_prompt_length=32",
            "data.max_response_length=64",
            f"data.custom_cls.path={CODE}",
            "data.custom_cls.name=Dataset",
            f"actor_rollout_ref.model.path={folder}/m",
            f"{rollout}.n=2",
            f"{rollout}.max_tokens_per_turn=4",
            f"{rollout}.agent.agent_loop_config_path={folder}/loops.yaml",
            f"{rollout}.multi_turn.tool_config_path={folder}/tools.yaml",
            f"reward_model.reward_manager={CODE}:Manager",
            "trainer.total_training_steps=1",
            "trainer.save_freq=0",
            "trainer.logger=[jsonl]",
            "trainer.device=cpu",
            f"trainer.default_local_dir={folder}/run",
            f"trainer.rollout_data_dir={folder}/run/rollouts",
        ]
    )


def test_both_loops_play_their_rows(run: Run) -> None:
    rows = run.rollouts(1)
    assert len(rows) == 8
    single = [row for row in rows if row["stamp"] is not None]
    assert len(single) == 6
    assert {(row["stamp"], row["counted"], row["most"]) for row in single} == {(64, 7, 5)}
    for row in rows:
        if row["stamp"] is None:
            assert json.loads(row["tool_rewards"]) == [0.25]
            assert 0 in row["response_mask"]
            assert row["response_mask"][0] == row["response_mask"][-1] == 1


def test_the_data_sets_own_methods_are_called(run: Run) -> None:
    rows = run.rollouts(1)
    assert {row["seen"] for row in rows} == {0, 2, 4, 8}  # without row 3
    assert all("? " in row["prompt_text"] for row in rows)


def test_the_manager_scores(run: Run) -> None:
    rows = run.rollouts(1)
    assert all(row["score"] == row["letters"] > 0 for row in rows)
    assert run.steps[0]["critic/score/mean"] == pytest.approx(sum(r["score"] for r in rows) / 8)
