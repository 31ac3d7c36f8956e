"""The ReAct loop and a row's `tool_config`, with a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hone.agents.runner import AgentLoopFailed
from hone.protocol import DataProto
from hone.rollout.scripted import ScriptedRollout

MULTI = "actor_rollout_ref.rollout.multi_turn"
TOOLS = """
tools:
  - name: calculator
    description: Arithmetic.
    parameters: {expression: {type: string, description: what to compute}}
  - name: calc_gsm8k_reward
"""
ACTION = (
    'Thought: I multiply.\nAction: calculator\nAction Input: {"expression": "6*7"}\nObservation:'
)
FINAL = "Thought: done.\nFinal Answer: 42"
HERMES = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'


@pytest.fixture
def run_row(
    runner: Callable[..., Any], rows: Callable[..., DataProto], tokenizer: Any, tmp_path: Path
) -> Callable[..., Any]:
    """`run_row(lines, *overrides, **columns)` returns prompt, response, fields, batch."""
    (tmp_path / "tools.yaml").write_text(TOOLS)

    def run(
        lines: list[Any], *overrides: str, agent: str = "react_agent", **columns: Any
    ) -> tuple[str, str, dict[str, Any], Any]:
        engine = ScriptedRollout(lines, tokenizer=tokenizer)
        settings = [
            "data.prompt_format=chat",
            "data.max_response_length=900",
            "data.max_prompt_length=2000",
            f"{MULTI}.tool_config_path={tmp_path / 'tools.yaml'}",
            *overrides,
        ]
        data = rows([[{"role": "user", "content": "6*7?"}]], agent_name=[agent], **columns)
        batch = runner(engine, *settings).run(data)
        fields = {name: column[0] for name, column in batch.non_tensor_batch.items()}
        prompt, response = (tokenizer.decode(batch.batch[n][0]) for n in ("prompts", "responses"))
        return prompt, response, fields, batch

    return run


def test_an_action_is_answered_after_observation(
    run_row: Callable[..., Any], tokenizer: Any
) -> None:
    thought = tokenizer.encode(ACTION, add_special_tokens=False)
    prompt, response, fields, batch = run_row([thought, FINAL])
    assert "calculator: Arithmetic. Arguments: expression (string): what to compute." in prompt
    assert prompt.rstrip().endswith("a:")
    assert response == f"{ACTION} 42\nThought:{FINAL}</s>"
    assert fields["tool_call_counts"] == 1
    observation = batch.batch["responses"][0][batch.batch["response_mask"][0] == 0]
    assert tokenizer.decode(observation) == " 42\nThought:"


def test_generation_stops_where_the_observation_begins(
    run_row: Callable[..., Any], tokenizer: Any
) -> None:
    forged = tokenizer.encode(f"{ACTION} 41, I promise", add_special_tokens=False)
    _, response, _, _ = run_row([forged, FINAL])
    assert response == f"{ACTION} 42\nThought:{FINAL}</s>"


def test_turns_end_where_the_model_length_ends(run_row: Callable[..., Any], tokenizer: Any) -> None:
    thought = tokenizer.encode(ACTION, add_special_tokens=False)
    prompt = len(run_row([FINAL])[3].batch["prompts"][0])
    limits = (
        f"data.max_prompt_length={prompt}",
        f"actor_rollout_ref.rollout.max_model_len={prompt + len(thought) + 5}",
    )
    _, response, _, _ = run_row([thought, FINAL], *limits)
    assert response == ACTION


def test_a_turn_that_ended_itself_is_answered_by_a_user_turn(run_row: Callable[..., Any]) -> None:
    _, response, _, _ = run_row([ACTION.removesuffix("\nObservation:"), FINAL])
    assert "</s>\nu:Observation: 42\nThought:\na:" in response


def test_a_malformed_action_is_answered_and_counted(
    run_row: Callable[..., Any], tokenizer: Any
) -> None:
    broken = tokenizer.encode(ACTION.replace('"6*7"', "6*"), add_special_tokens=False)
    _, response, fields, _ = run_row([broken, FINAL])
    assert "Error: `arguments` is not a JSON object" in response
    assert (fields["tool_call_counts"], fields["tool_failures"]) == (1, 1)


def test_a_row_chooses_its_tools_format_and_limits(
    run_row: Callable[..., Any], tokenizer: Any
) -> None:
    thought = tokenizer.encode(ACTION, add_special_tokens=False)
    config = {"available_tools": ["calculator"], "tool_format": "react", "timeout": None}
    prompt, response, _, _ = run_row([thought, FINAL], agent="tool_agent", tool_config=[config])
    assert "calc_gsm8k_reward" not in prompt
    assert " 42\nThought:" in response
    config = {"tool_format": "function_calling", "max_tool_calls": 1, "timeout": 30}
    _, response, fields, _ = run_row([HERMES, HERMES, "42"], tool_config=[config])
    assert "\nt:42" in response
    assert "all 1 tool calls are used up" in response
    assert fields["tool_failures"] == 1


@pytest.mark.parametrize(
    ("tool_config", "why"),
    [
        (
            {"available_tools": ["rm"]},
            "names 'rm'; the tools of this run are calculator, calc_gsm8k",
        ),
        ({"tool_format": "xml"}, "tool_format='xml'; give react or function_calling"),
        ({"max_tool_calls": -1}, "max_tool_calls=-1; give a count"),
        ({"timeout": 0}, "timeout=0; give seconds"),
        ({"tools": []}, "tool_config has no 'tools'"),
        ({"available_tools": "calculator"}, "available_tools='calculator'; give a list of names"),
        ({"available_tools": [["calculator"]]}, "give a list of names"),
        ({"available_tools": 5}, "available_tools=5; give a list of names"),
        ({"max_tool_calls": True}, "max_tool_calls=True; give a count"),
        ({"timeout": True}, "timeout=True; give seconds"),
    ],
)
def test_a_row_cannot_have_what_the_run_has_not(
    run_row: Callable[..., Any], tool_config: dict[str, Any], why: str
) -> None:
    with pytest.raises(AgentLoopFailed, match=why):
        run_row(["x"], tool_config=[tool_config])


def test_rewards_stand_on_the_token_that_ended_the_turn(run_row: Callable[..., Any]) -> None:
    call = {"name": "calc_gsm8k_reward", "arguments": {"answer": "41"}}
    kwargs = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "42"}}}
    turn = f"<tool_call>{json.dumps(call)}</tool_call>"
    _, _, fields, _ = run_row([turn, "42"], agent="tool_agent", tools_kwargs=[kwargs])
    (reward,) = fields["turn_rewards"]
    assert reward == {"name": "calc_gsm8k_reward", "reward": -0.05, "token": len(turn)}
    assert fields["turn_spans"][0] == {
        "role": "assistant",
        "tokens": len(turn) + 1,
        "mask": 1,
        "calls": 1,
        "reward": -0.05,
    }
