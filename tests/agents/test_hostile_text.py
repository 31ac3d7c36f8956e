"""Hostile text in the tool loop: every call is answered, and nothing raises."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.agents.agent_data import AgentData
from hone.agents.interactions.contract import BaseInteraction
from hone.agents.interactions.session import InteractionSession
from hone.agents.observations import observation_ids, truncate_text, truncate_tokens
from hone.agents.parsers.contract import ToolCall, ToolParser
from hone.agents.parsers.json_calls import HermesToolParser
from hone.agents.runner import LoopRunner
from hone.agents.tools.function_tool import tool_of
from hone.agents.tools.loading import Tool
from hone.agents.tools.session import ToolSession
from hone.models.tiny import character_tokenizer
from hone.protocol import DataProto
from hone.rollout.scripted import ScriptedRollout

PIECES = (
    '<tool_call>{"name": "echo", "arguments": {"text": "\\ud800"}}</tool_call>',
    '<tool_call>{"name": "echo", "arguments": {"text": "1", "\\ud800": "x"}}</tool_call>',
    '<tool_call>{"name": "fail", "arguments": "{\\"text\\": \\"\\\\udfff\\"}"}</tool_call>',
    '<tool_call>{"name": "graph", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "echo", "arguments": {"text": ' + "[" * 99 + "]" * 99 + "}}</tool_call>",
    "<tool_call>" + "[" * 60_000 + "</tool_call>",
    '<tool_call>{"name": "echo", "arguments": {"text": 1' + "0" * 5000 + "}}</tool_call>",
    '<tool_call>{"name": "echo", "arguments": {"text": NaN}}</tool_call>',
    '<tool_call>{"name": "echo", "name": "fail", "arguments": {"text": 1}}</tool_call>',
    '<tool_call>{"name": "\\udead", "arguments": {}}</tool_call>',
    '<tool_call>{"name": {}, "arguments": []}</tool_call>',
    "<tool_call>",
    "</tool_call>",
    "<tool_call>null</tool_call>",
    "\0\x1b[2J\ud800",
)
TURN = st.lists(st.sampled_from(PIECES) | st.text(st.characters(), max_size=20), max_size=6)
TOKENIZER = character_tokenizer()


Text = Annotated[str, "what to say"]


def echo(text: Text) -> Any:
    """Say it."""
    return text


def fail(text: Text) -> str:
    """Fail with it."""
    raise ValueError(text)


def graph() -> Any:
    """A graph."""
    node: dict[str, Any] = {"name": "\ud800"}
    node["children"] = [node, node]
    return node, 0.5, {"self": node}


TOOLS: dict[str, Tool] = {f.__name__: tool_of(f) for f in (echo, fail, graph)}


def make_session() -> ToolSession:
    def truncate(text: str) -> str:
        return truncate_tokens(truncate_text(text, 100, "middle"), TOKENIZER, 50, "right")

    return ToolSession(TOOLS, AgentData([], [1], "r", {}), 99, None, 60.0, truncate)


@settings(max_examples=40, deadline=None)
@given(TURN)
def test_every_call_of_hostile_text_is_answered(pieces: list[str]) -> None:
    calls = HermesToolParser().calls("".join(pieces))
    session = make_session()
    answers = asyncio.run(session.run_calls(calls))
    assert len(answers) == len(calls) == len(session.outputs)
    json.dumps(session.outputs, ensure_ascii=False).encode("utf-8")
    observation_ids(
        [{"role": "tool", "content": answer} for answer in answers],
        TOKENIZER,
        last_token=0,
        template_kwargs={},
        chat=True,
    )


@settings(max_examples=40, deadline=None)
@given(st.text(st.characters() | st.sampled_from("\ud800\0")), st.sampled_from(["raise", "say"]))
def test_what_a_simulated_user_says_is_cleaned(text: str, how: str) -> None:
    class User(BaseInteraction):
        async def generate_response(self, *_: Any, **__: Any) -> tuple[bool, str, float, Any]:
            if how == "raise":
                raise ValueError(text)
            return False, text, 0.0, {}

    async def first_reply() -> str | None:
        user = InteractionSession(User({}), {}, 60.0)
        await user.start(60.0)
        return await user.reply([], 60.0)

    reply = asyncio.run(first_reply())
    assert (reply is None) == (how == "raise")
    (reply or "").encode("utf-8")


TOOL_FILE = '''
from hone.tools.function_tool import function_tool

@function_tool
def echo(k: str) -> str:
    """Say it again.

    Args:
        k: what to say
    """
    return k
'''


@pytest.mark.parametrize(
    "arguments", ['{"k":"1","\\ud800":"x"}', '{"k":"\\ud800"}', '{"k":"\\u0000"}', "[" * 2000]
)
def test_a_policy_cannot_stop_a_run_with_a_tool_call(
    runner: Callable[..., LoopRunner],
    rows: Callable[..., DataProto],
    tmp_path: Path,
    arguments: str,
) -> None:
    (tmp_path / "tools.py").write_text(TOOL_FILE)
    call = f'<tool_call>{{"name":"echo","arguments":{arguments}}}</tool_call>'
    turns = [call, "done"]
    engine = ScriptedRollout(lambda _: turns.pop(0), tokenizer=TOKENIZER)
    batch = runner(
        engine,
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={tmp_path / 'tools.py'}",
        "actor_rollout_ref.rollout.multi_turn.enable=true",
        "data.max_response_length=4000",
        "data.max_prompt_length=4000",
        "data.prompt_format=chat",
    ).run(rows(["a"]))
    text = TOKENIZER.decode(batch.batch["responses"][0])
    assert turns == []
    assert text.count("done") == 1


class Raising(ToolParser):
    def calls(self, text: str) -> list[ToolCall]:
        raise RecursionError("deep\ud800")


def test_a_parser_that_raises_makes_a_failed_call(
    runner: Callable[..., LoopRunner], rows: Callable[..., DataProto], tmp_path: Path
) -> None:
    (tmp_path / "tools.py").write_text(TOOL_FILE)
    turns = ["x", "y"]
    engine = ScriptedRollout(lambda _: turns.pop(0), tokenizer=TOKENIZER)
    batch = runner(
        engine,
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={tmp_path / 'tools.py'}",
        f"actor_rollout_ref.rollout.multi_turn.format='{__file__}:Raising'",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2",
        "actor_rollout_ref.rollout.multi_turn.enable=true",
        "data.max_response_length=400",
        "data.max_prompt_length=4000",
        "data.prompt_format=chat",
    ).run(rows(["a"]))
    assert list(batch.non_tensor_batch["tool_failures"]) == [1]
    assert "cannot be parsed" in batch.non_tensor_batch["tool_outputs"][0][0]["text"]
