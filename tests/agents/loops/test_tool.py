"""The tool loop with a scripted engine: turns, masks, limits; one real run of the trainer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hone.agents.interactions.gsm8k import INCORRECT_REPLY
from hone.agents.loops.tool import ToolAgentLoop
from hone.agents.runner import AgentLoopFailed
from hone.models.tiny import character_tokenizer
from hone.protocol import DataProto
from hone.rollout.scripted import ScriptedRollout

Rows = Callable[..., DataProto]
TOOLS = "tools:\n  - class_name: hone.agents.tools.gsm8k.Gsm8kTool\n    config: {type: native}\n"
INTERACTIONS = (
    "interaction:\n  - name: gsm8k\n"
    "    class_name: hone.agents.interactions.gsm8k.Gsm8kInteraction\n"
)
MULTI = "actor_rollout_ref.rollout.multi_turn"


def call_text(answer: str) -> str:
    """Returns a model turn that calls the tool with this answer."""
    call = {"name": "calc_gsm8k_reward", "arguments": {"answer": answer}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


TRUTH = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "42"}}}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "tools.yaml").write_text(TOOLS)
    (tmp_path / "interactions.yaml").write_text(INTERACTIONS)
    return {
        "tools": str(tmp_path / "tools.yaml"),
        "interactions": str(tmp_path / "interactions.yaml"),
    }


@pytest.fixture
def run_row(
    runner: Callable[..., Any], rows: Rows, tokenizer: Any, files: dict[str, str]
) -> Callable[..., Any]:
    """`run_row(lines, *overrides, **columns)` runs one row and returns engine and batch."""

    def run(lines: list[str], *overrides: str, **columns: Any) -> tuple[ScriptedRollout, DataProto]:
        engine = ScriptedRollout(lines, tokenizer=tokenizer)
        all_overrides = [
            "data.prompt_format=chat",
            "data.max_response_length=900",
            "data.max_prompt_length=64",
            f"{MULTI}.tool_config_path={files['tools']}",
            f"{MULTI}.enable=true",
            *overrides,
        ]
        columns.setdefault("tools_kwargs", [TRUTH])
        batch = runner(engine, *all_overrides).run(
            rows([[{"role": "user", "content": "6*7?"}]], **columns)
        )
        return engine, batch

    return run


def text_with_mask(tokenizer: Any, batch: DataProto, value: int) -> str:
    """Returns the response text with this mask value."""
    mask = (batch.batch["response_mask"][0] == value) & batch.batch["attention_mask"][
        0, -batch.batch["responses"].shape[1] :
    ].bool()
    text: str = tokenizer.decode(batch.batch["responses"][0][mask])
    return text


def test_a_call_is_answered_and_the_model_speaks_again(
    run_row: Callable[..., Any], tokenizer: Any
) -> None:
    first, last = call_text("41"), "so #### 42"
    engine, batch = run_row([first, call_text("42"), last])
    answer_format = "Current parsed answer='{}' score={}"
    turns = [f"\nt:{answer_format.format(*x)}\na:" for x in (("41", 0.0), ("42", 1.0))]
    assert text_with_mask(tokenizer, batch, 1) == f"{first}</s>{call_text('42')}</s>{last}</s>"
    assert text_with_mask(tokenizer, batch, 0) == "".join(turns)
    fields = {name: column[0] for name, column in batch.non_tensor_batch.items()}
    assert fields["tool_rewards"] == [-0.05, 0.0]
    assert fields["reward_scores"] == {"calc_gsm8k_reward": 1.0}
    assert fields["num_turns"] == 6
    assert (fields["tool_call_counts"], fields["tool_failures"]) == (2, 0)
    assert [out["arguments"] for out in fields["tool_outputs"]] == [
        {"answer": "41"},
        {"answer": "42"},
    ]
    # Tokens in, tokens out: each request is the one before it, its answer, and the observation.
    one, two, three = (request.prompt_ids for request in engine.requests)
    grown = [*batch.batch["prompts"][0].tolist(), *batch.batch["responses"][0].tolist()]
    assert grown[: len(one)] == one
    assert grown[: len(two)] == two
    assert grown[: len(three)] == three


@pytest.mark.parametrize(
    ("missing", "field"), [("versions", "versions"), ("log_probs", "logprobs")]
)
def test_an_engine_that_leaves_out_what_a_token_needs_is_refused(
    run_row: Callable[..., Any], missing: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ScriptedRollout,
        "generate",
        lambda self, *args, **options: _without(missing, GENERATE(self, *args, **options)),
    )
    with pytest.raises(AgentLoopFailed, match=rf"{field}; give one entry per token, as the engine"):
        run_row([call_text("42"), "42"])


GENERATE = ScriptedRollout.generate


async def _without(field: str, output: Any) -> Any:
    return replace(await output, **{field: []})


def test_observations_have_no_log_prob_and_the_version_of_their_turn(
    run_row: Callable[..., Any],
) -> None:
    _, batch = run_row([call_text("41"), "done"])
    mask = batch.batch["response_mask"][0]
    assert (batch.batch["rollout_log_probs"][0][mask == 0] == 0).all()
    assert set(batch.non_tensor_batch["versions"][0]) == {0}
    assert len(batch.non_tensor_batch["versions"][0]) == len(mask)


def test_a_turn_without_a_call_ends_the_trajectory(run_row: Callable[..., Any]) -> None:
    engine, batch = run_row(["42"])
    assert len(engine.requests) == 1
    assert batch.non_tensor_batch["num_turns"][0] == 2


def test_the_models_turns_are_limited(run_row: Callable[..., Any]) -> None:
    engine, _ = run_row([call_text("1"), "x"], f"{MULTI}.max_assistant_turns=1")
    assert len(engine.requests) == 1


def test_one_users_turn_allows_two_of_the_models(run_row: Callable[..., Any]) -> None:
    engine, _ = run_row([call_text("1"), call_text("2"), "x"], f"{MULTI}.max_user_turns=1")
    assert len(engine.requests) == 2


def test_when_calls_are_used_up_the_model_is_told(
    run_row: Callable[..., Any], tokenizer: Any
) -> None:
    _, batch = run_row([call_text("1"), call_text("2"), "x"], f"{MULTI}.max_tool_calls=1")
    assert "all 1 tool calls are used up" in text_with_mask(tokenizer, batch, 0)
    assert batch.non_tensor_batch["tool_failures"][0] == 1


def test_only_so_many_calls_of_a_turn_are_made(run_row: Callable[..., Any], tokenizer: Any) -> None:
    both = call_text("1") + call_text("2")
    _, one = run_row([both, "x"])
    _, two = run_row([both, "x"], f"{MULTI}.max_parallel_calls=2")
    assert "at most 1 tool calls per turn" in text_with_mask(tokenizer, one, 0)
    assert "parsed answer='2'" in text_with_mask(tokenizer, two, 0)


@pytest.mark.parametrize(
    ("side", "shown"),
    [
        ("right", "Curre...(truncated)"),
        ("left", "(truncated)...e=0.0"),
        ("middle", "Cu...(truncated)...0.0"),
    ],
)
def test_long_answers_are_cut(
    run_row: Callable[..., Any], tokenizer: Any, side: str, shown: str
) -> None:
    limits = (f"{MULTI}.max_tool_response_length=5", f"{MULTI}.tool_response_truncate_side={side}")
    _, batch = run_row([call_text("1"), "x"], *limits)
    assert text_with_mask(tokenizer, batch, 0) == f"\nt:{shown}\na:"


def test_observations_are_cut_in_tokens_too(run_row: Callable[..., Any], tokenizer: Any) -> None:
    overrides = (f"{MULTI}.max_observation_tokens=4", f"{MULTI}.tool_response_truncate_side=right")
    _, batch = run_row([call_text("1"), "x"], *overrides)
    assert text_with_mask(tokenizer, batch, 0) == "\nt:Curr\na:"


def test_an_observation_that_leaves_no_room_is_not_appended(
    run_row: Callable[..., Any], tokenizer: Any
) -> None:
    first = call_text("41")
    engine, batch = run_row([first, "x"], f"data.max_response_length={len(first) + 20}")
    assert len(engine.requests) == 1
    assert text_with_mask(tokenizer, batch, 0) == ""


def test_turns_end_where_the_model_length_ends(
    run_row: Callable[..., Any], tokenizer: Any, files: dict[str, str]
) -> None:
    prompt = len(run_row(["x"])[0].requests[0].prompt_ids)
    short = (f"data.max_prompt_length={prompt}", "actor_rollout_ref.rollout.max_model_len={}")
    _, tool = run_row(
        [call_text("41"), "x"], short[0], short[1].format(prompt + len(call_text("41")) + 20)
    )
    assert text_with_mask(tokenizer, tool, 0) == ""
    interactions = f"{MULTI}.interaction_config_path={files['interactions']}"
    kwargs = {"name": "gsm8k", "query": "6*7?", "ground_truth": "42"}
    limits = (short[0], short[1].format(prompt + 20))
    _, user = run_row(["#### 41"] * 9, interactions, *limits, interaction_kwargs=[kwargs])
    assert text_with_mask(tokenizer, user, 0) == ""
    assert user.non_tensor_batch["turn_scores"][0] == [0.0]


def test_a_turn_without_tokens_is_the_last(
    run_row: Callable[..., Any], files: dict[str, str]
) -> None:
    interactions = f"{MULTI}.interaction_config_path={files['interactions']}"
    kwargs = {"name": "gsm8k", "query": "6*7?", "ground_truth": "42"}
    engine, batch = run_row(["#### 41", [], "never"], interactions, interaction_kwargs=[kwargs])
    assert len(engine.requests) == 2
    assert batch.non_tensor_batch["turn_scores"][0] == [0.0]


def test_a_turn_has_what_is_left_of_the_response(run_row: Callable[..., Any]) -> None:
    engine, _ = run_row([call_text("41"), "x"], "data.max_response_length=300")
    used = len(engine.requests[1].prompt_ids) - len(engine.requests[0].prompt_ids)
    assert engine.requests[1].sampling.max_tokens == 300 - used


def test_a_malformed_call_is_answered_not_run(run_row: Callable[..., Any], tokenizer: Any) -> None:
    _, batch = run_row(["<tool_call>print('x')</tool_call>", "x"])
    assert "not valid JSON" in text_with_mask(tokenizer, batch, 0)
    assert batch.non_tensor_batch["tool_failures"][0] == 1


def test_a_trajectory_that_takes_too_long_ends_with_its_turn(run_row: Callable[..., Any]) -> None:
    engine, batch = run_row([call_text("1"), "x"], f"{MULTI}.trajectory_timeout_s=1e-9")
    assert len(engine.requests) == 1
    assert batch.non_tensor_batch["timeouts"][0] == ["trajectory"]


SLOW = '''
import asyncio
from hone.agents.tools.function_tool import function_tool


@function_tool
async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long
    """
    await asyncio.sleep(seconds)
    return "awake"
'''


def test_a_slow_tool_is_cut_off_and_functions_are_tools(
    run_row: Callable[..., Any], tokenizer: Any, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    call = '<tool_call>{"name": "wait", "arguments": {"seconds": 30}}</tool_call>'
    overrides = (
        f"{MULTI}.function_tool_path={tmp_path / 'slow.py'}",
        f"{MULTI}.tool_timeout_s=0.05",
    )
    _, batch = run_row([call, "x"], *overrides)
    assert "wait took longer than 0.05 s" in text_with_mask(tokenizer, batch, 0)
    assert batch.non_tensor_batch["timeouts"][0] == ["wait"]


OWN_PARSER = """
from hone.agents.parsers.contract import ToolCall, ToolParser


class Question(ToolParser):
    def calls(self, text):
        asked = text.replace("</s>", "").partition("?")[2]
        return [ToolCall("calc_gsm8k_reward", {"answer": asked})] if asked else []
"""


def test_a_parser_of_ones_own_is_named_by_its_place(
    run_row: Callable[..., Any], tokenizer: Any, tmp_path: Path
) -> None:
    (tmp_path / "parser.py").write_text(OWN_PARSER)
    _, batch = run_row(["?42", "x"], f"{MULTI}.format='{tmp_path / 'parser.py'}:Question'")
    assert "parsed answer='42' score=1.0" in text_with_mask(tokenizer, batch, 0)


def test_a_simulated_user_answers_until_the_answer_is_right(
    run_row: Callable[..., Any], tokenizer: Any, files: dict[str, str]
) -> None:
    interactions = f"{MULTI}.interaction_config_path={files['interactions']}"
    kwargs = {"name": "gsm8k", "query": "6*7?", "ground_truth": "42"}
    engine, batch = run_row(
        ["#### 41", "#### 42", "never"], interactions, interaction_kwargs=[kwargs]
    )
    assert len(engine.requests) == 2
    assert text_with_mask(tokenizer, batch, 0) == f"\nu:{INCORRECT_REPLY}\na:"
    assert batch.non_tensor_batch["turn_scores"][0] == [0.0, 1.0]
    assert batch.non_tensor_batch["reward_scores"][0] == {"gsm8k": 1.0}


HANGS = """
import asyncio
from hone.agents.interactions.contract import BaseInteraction


class Hang(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        await asyncio.Event().wait()
"""


def test_a_simulated_user_that_hangs_ends_the_talk_when_the_trajectory_ends(
    run_row: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 0.0, perf_counter=time.perf_counter)
    monkeypatch.setattr("hone.agents.loops.tool.time", clock)  # a slow machine uses up no time
    (tmp_path / "user.py").write_text(HANGS)
    listed = f"interaction:\n  - name: u\n    class_name: {tmp_path / 'user.py'}:Hang\n"
    (tmp_path / "hang.yaml").write_text(listed)
    overrides = (
        f"{MULTI}.interaction_config_path={tmp_path / 'hang.yaml'}",
        f"{MULTI}.trajectory_timeout_s=0.1",
    )
    engine, batch = run_row(["first", "never"], *overrides, interaction_kwargs=[{"name": "u"}])
    assert len(engine.requests) == 1
    fields = {name: column[0] for name, column in batch.non_tensor_batch.items()}
    assert (fields["timeouts"], fields["tool_failures"]) == (["u"], 1)
    assert (fields["turn_scores"], fields["reward_scores"]) == ([], {})


def test_an_unknown_interaction_is_said(run_row: Callable[..., Any], files: dict[str, str]) -> None:
    interactions = f"{MULTI}.interaction_config_path={files['interactions']}"
    with pytest.raises(AgentLoopFailed, match=r"name='other' is not in .*it has gsm8k"):
        run_row(["x"], interactions, interaction_kwargs=[{"name": "other"}])


def test_rows_choose_by_agent_name_where_the_switch_is_off(run_row: Callable[..., Any]) -> None:
    off = f"{MULTI}.enable=false"
    single, _ = run_row([call_text("1"), "x"], off)
    named, _ = run_row([call_text("1"), "x"], off, agent_name=["tool_agent"])
    assert (len(single.requests), len(named.requests)) == (1, 2)


def test_a_prompt_too_long_with_its_tools_is_cut_as_the_data_say(
    run_row: Callable[..., Any], tokenizer: Any
) -> None:
    with pytest.raises(AgentLoopFailed, match=r"data\.max_prompt_length=4"):
        run_row(["x"], "data.max_prompt_length=4")
    _, batch = run_row(["x"], "data.max_prompt_length=4", "data.truncation=left")
    assert tokenizer.decode(batch.batch["prompts"][0]) == "?\na:"


def test_a_real_run_calls_its_tool_and_learns_only_from_what_it_wrote(
    tmp_path: Path, files: dict[str, str]
) -> None:
    """GRPO with a tool; some tokens of the vocabulary are whole calls."""
    import pyarrow.parquet as pq

    from hone.models.tiny import save_pretrained, tiny_lm
    from hone.tracking import read_metrics
    from hone.trainer.main_ppo import run
    from hone.verl.dialect import load_config

    tokenizer = character_tokenizer(words=[call_text(str(n)) for n in range(40, 70)])
    save_pretrained(tiny_lm(len(tokenizer), hidden=32, mlp=48, seed=3), tokenizer, tmp_path / "m")
    row = {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "prompt": [{"role": "user", "content": "6*7?"}],
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": {"need_tools_kwargs": True, "tools_kwargs": TRUTH},
    }
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    run(
        load_config(
            [
                "algorithm.adv_estimator=grpo",
                f"data.train_files={tmp_path}/rows.jsonl",
                "data.val_files=[]",
                "data.train_batch_size=4",
                "data.max_prompt_length=32",
                "data.max_response_length=600",
                f"actor_rollout_ref.model.path={tmp_path}/m",
                "actor_rollout_ref.actor.optim.lr=1e-3",
                "actor_rollout_ref.rollout.n=4",
                "actor_rollout_ref.rollout.max_tokens_per_turn=8",
                f"{MULTI}.tool_config_path={files['tools']}",
                f"{MULTI}.max_assistant_turns=3",
                "trainer.total_training_steps=2",
                "trainer.save_freq=0",
                "trainer.logger=[jsonl]",
                "trainer.device=cpu",
                f"trainer.default_local_dir={tmp_path}/run",
                f"trainer.rollout_data_dir={tmp_path}/run/rollouts",
            ]
        )
    )
    last = read_metrics(tmp_path / "run")[-1]
    assert last["num_turns/max"] > 2
    assert last["tool_call_counts/max"] >= 1
    lines = pq.read_table(tmp_path / "run" / "rollouts" / "step_1.parquet").to_pylist()
    called = [line for line in lines if json.loads(line["tool_outputs"])]
    assert called
    for line in called:
        assert set(line["response_mask"]) == {0, 1}
        (first, *_) = json.loads(line["tool_outputs"])
        assert first["text"].startswith(("Current parsed answer=", "Error:"))
        assert first["text"] in line["response_text"]


def test_a_step_of_verls_loop_that_would_not_be_called_is_refused() -> None:
    async def step(*_: Any) -> None: ...

    with pytest.raises(TypeError, match="overrides _handle_generating_state"):
        type("Mine", (ToolAgentLoop,), {"_handle_generating_state": step})
    assert issubclass(type("Mine", (ToolAgentLoop,), {"run": step}), ToolAgentLoop)
