"""The agents of the documentation, each in two steps of training: GSM8K with tool and interaction,
ReAct, `math_expression`, rows with `tool_config`, and the loop of docs/agents.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trainer.runs import Run

from hone.data.rows import write_parquet
from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
MULTI = "actor_rollout_ref.rollout.multi_turn"
TOOL_FILE = "examples/sglang_multiturn/config/tool_config/gsm8k_tool_config.yaml"
BY_NAME = """
tools:
  - name: calculator
    description: arithmetic
    parameters: {expression: {type: string, description: "such as '23 * 45 + 67'"}}
"""
AGENT_REWARD = '''
def compute_agent_reward(data_source, solution_str, ground_truth, extra_info):
    """Returns the task's score minus a tenth for each call after the third."""
    task_reward = 1.0 if ground_truth in solution_str else 0.0
    num_tool_calls = extra_info.get("num_tool_calls", 0)
    return task_reward + -0.1 * max(0, num_tool_calls - 3) - 0.01 * num_tool_calls
'''


def hermes(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


CALLS = (
    *(hermes("calc_gsm8k_reward", answer=str(n)) for n in range(40, 56)),
    *(hermes("calculate", a=n, operator="@", b=2) for n in range(16)),
    *(f'<tool>calculator</tool><args>{{"expression": "{n}*7"}}</args>' for n in range(16)),
    *(
        f'Action: calculator\nAction Input: {{"expression": "{n}*7"}}\nObservation:'
        for n in range(16)
    ),
    *(f"#### {n}" for n in range(40, 56)),
)
"""Tokens that are whole calls and answers, so that a random policy uses them."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = character_tokenizer(words=CALLS)
    lm = tiny_lm(len(tokenizer), hidden=32, mlp=48, seed=3, max_positions=4096)
    return Path(save_pretrained(lm, tokenizer, tmp_path_factory.mktemp("agents") / "model"))


@pytest.fixture
def train(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[dict[str, Any]]]:
    """Runs two GRPO steps; returns the rows of the first rollout file."""
    from hone.trainer.main_ppo import main

    monkeypatch.chdir(ROOT)

    def go(rows: list[dict[str, Any]] | Path, *command: str) -> list[dict[str, Any]]:
        data = rows if isinstance(rows, Path) else tmp_path / "train.parquet"
        if not isinstance(rows, Path):
            write_parquet(rows, data)
        main(
            [
                "algorithm.adv_estimator=grpo",
                f"data.train_files={data}",
                "data.val_files=[]",
                "data.train_batch_size=4",
                "data.max_prompt_length=2500",
                "data.max_response_length=600",
                f"actor_rollout_ref.model.path={model}",
                "actor_rollout_ref.rollout.n=4",
                "actor_rollout_ref.rollout.max_tokens_per_turn=12",
                f"{MULTI}.max_assistant_turns=3",
                "trainer.total_training_steps=2",
                "trainer.save_freq=-1",
                "trainer.test_freq=-1",
                "trainer.val_before_train=false",
                "trainer.logger=[jsonl]",
                f"trainer.default_local_dir={tmp_path / 'run'}",
                f"trainer.rollout_data_dir={tmp_path / 'run' / 'rollouts'}",
                *command,
            ]
        )
        run = Run(tmp_path / "run")
        assert [line["step"] for line in run.steps] == [1, 2]
        return run.rollouts(1)

    return go


def gsm8k_rows(script: str, folder: Path) -> Path:
    """Returns the training file that a documented script makes of eight problems."""
    lines = [{"question": f"{n}*7?", "answer": f"It is {n * 7}.\n#### {n * 7}"} for n in range(8)]
    source = folder / "source" / "gsm8k"
    source.mkdir(parents=True)
    for split in ("train", "test"):
        (source / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    program = ROOT / "examples" / "data_preprocess" / f"{script}.py"
    arguments = ["--local_dir", str(folder), "--source_dir", str(source.parent)]
    subprocess.run([sys.executable, str(program), *arguments], check=True)
    return folder / "train.parquet"


def outputs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [out for row in rows for out in json.loads(row["tool_outputs"] or "[]")]


def test_gsm8k_with_the_tool_agent_and_step_rewards(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    coefficient = "reward_model.turn_reward_coef.calc_gsm8k_reward=2.0"
    rows = train(
        gsm8k_rows("gsm8k_tool_agent_loop", tmp_path),
        f"{MULTI}.tool_config_path={TOOL_FILE}",
        coefficient,
    )
    called = [row for row in rows if outputs([row])]
    assert called
    for row in rows:
        rule, turn = sum(row["reward/rule"]), sum(row["reward/turn/calc_gsm8k_reward"])
        assert row["score"] == pytest.approx(rule + 2.0 * turn)
    for row in called:
        (first, *_) = json.loads(row["turns"])
        turn_rewards = row["reward/turn/calc_gsm8k_reward"]
        assert turn_rewards[first["tokens"] - 1] == pytest.approx(first.get("reward", 0.0))
        assert first["mask"] == 1


def test_gsm8k_with_an_interaction(train: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "talks.yaml").write_text(
        "interaction:\n  - name: gsm8k\n"
        "    class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction\n"
    )
    rows = train(
        gsm8k_rows("gsm8k_multiturn_w_interaction", tmp_path),
        f"{MULTI}.enable=true",
        f"{MULTI}.interaction_config_path={tmp_path / 'talks.yaml'}",
        "reward_model.trajectory_reward_coef.gsm8k=0.5",
    )
    assert any(row["num_turns"] > 2 for row in rows)
    for row in rows:
        of_talk = json.loads(row["reward_scores"])["gsm8k"]
        assert sum(row["reward/trajectory/gsm8k"]) == pytest.approx(of_talk)
        assert row["score"] == pytest.approx(sum(row["reward/rule"]) + 0.5 * of_talk)


def question(**more: Any) -> list[dict[str, Any]]:
    return [
        {
            "data_source": "gsm8k",
            "prompt": [{"role": "user", "content": "6*7?"}],
            "reward_model": {"ground_truth": "42"},
            **more,
        }
    ] * 4


def test_the_react_agent(train: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(BY_NAME)
    rows = train(question(agent_name="react_agent"), f"tool_config_path={tmp_path / 'tools.yaml'}")
    assert any(out["name"] == "calculator" and out["reward"] == 0.0 for out in outputs(rows))


def test_rows_with_a_tool_config_and_a_score_that_counts_calls(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "tools.yaml").write_text(BY_NAME)
    (tmp_path / "my_reward.py").write_text(AGENT_REWARD)
    config = {"available_tools": ["calculator"], "tool_format": "react", "max_tool_calls": 5}
    rows = train(
        question(tool_config=config),
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.agent_loop=tool_agent_loop",
        f"tool_config_path={tmp_path / 'tools.yaml'}",
        f"custom_reward_function.path={tmp_path / 'my_reward.py'}",
        "custom_reward_function.name=compute_agent_reward",
        "tool_config.timeout=30",
    )
    assert outputs(rows)
    for row in rows:
        calls = len(outputs([row]))
        right = "42" in "".join(t["text"] for t in json.loads(row["turns"] or "[]") if t["mask"])
        if row["turns"]:
            assert row["score"] == pytest.approx(right - 0.1 * max(0, calls - 3) - 0.01 * calls)


def test_the_math_expression_agent(train: Callable[..., Any], tmp_path: Path) -> None:
    folder = ROOT / "examples" / "math_expression"
    script = [sys.executable, str(folder / "create_dataset.py"), "--local_dir", str(tmp_path)]
    subprocess.run([*script, "--train_size", "8", "--test_size", "2"], check=True)
    rows = train(
        tmp_path / "train.parquet",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path=examples/math_expression/agent.yaml",
        "custom_reward_function.path=examples/math_expression/math_expression.py",
    )
    assert any(out["name"] == "calculate" for out in outputs(rows))


def test_the_loop_of_the_documents_as_the_agents_page_corrects_it(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(# my_agent_loop.py\n.*?)```", page, flags=re.S)
    (tmp_path / "my_agent_loop.py").write_text(code)
    loop = f"{tmp_path / 'my_agent_loop.py'}:MyAgentLoop"
    rows = train(question(), f"actor_rollout_ref.rollout.agent.default_agent_loop='{loop}'")
    assert any({*row["response_mask"]} == {0, 1} for row in rows)
