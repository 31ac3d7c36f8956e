"""The LangGraph agent of the examples, where langgraph is installed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hone.agents.contract import ServerManager
from hone.agents.loop_names import loop_arguments
from hone.models.tiny import character_tokenizer
from hone.plugins import load_object
from hone.rollout.scripted import ScriptedRollout
from hone.verl.dialect import load_config

pytest.importorskip("langgraph", reason="pip install langgraph")


def test_the_graph_calls_its_tool_and_answers(examples: Path) -> None:
    tokenizer = character_tokenizer()
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    engine = ScriptedRollout([call, "five"], tokenizer=tokenizer)
    config = load_config(["actor_rollout_ref.model.path=unused", "data.max_response_length=400"])

    async def play() -> Any:
        manager = ServerManager(engine, seed=1, max_tokens=400)
        factory = load_object(f"{examples / 'langgraph_agent.py'}:LangGraphAgentLoop")
        loop = factory(server_manager=manager, **loop_arguments(config, tokenizer))
        return await loop.run({}, raw_prompt=[{"role": "user", "content": "2+3?"}])

    output = asyncio.run(play())
    assert tokenizer.decode(output.response_ids) == f"{call}</s>\nt:5\na:five</s>"
    assert output.num_turns == 4
    assert set(output.response_mask) == {0, 1}
