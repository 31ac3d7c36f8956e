"""The engine client of a trajectory, and the default loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from hone.agents.contract import AgentLoopOutput, ServerManager
from hone.rollout.contract import Sampling, StopReason, TokenOutput
from hone.rollout.scripted import ScriptedRollout


class Counting:
    """Generates as many tokens as allowed."""

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, *_: Any, **__: Any
    ) -> TokenOutput:
        return TokenOutput([7] * sampling.max_tokens, stop_reason=StopReason.LENGTH)


@pytest.mark.parametrize(("prompt", "length"), [(2, 6), (5, 5), (9, 1), (10, 0), (12, 0)])
def test_a_response_ends_at_the_model_length(prompt: int, length: int) -> None:
    engine: Any = Counting()
    manager = ServerManager(engine, seed=0, max_tokens=6, max_model_len=10)
    out = asyncio.run(manager.generate("a", prompt_ids=[3] * prompt, sampling_params={}))
    assert len(out.token_ids) == length
    assert out.stop_reason is StopReason.LENGTH


def test_a_prompt_may_be_what_the_tokenizer_returns(tokenizer: Any) -> None:
    encoding, ids = tokenizer("1+1="), tokenizer.encode("1+1=")
    assert type(encoding) is not list
    engine = ScriptedRollout(["2"], tokenizer=tokenizer)
    manager = ServerManager(engine, seed=0, max_tokens=6, max_model_len=10)
    asyncio.run(manager.generate("a", prompt_ids=encoding, sampling_params={}))
    assert engine.requests[0].prompt_ids == ids
    assert AgentLoopOutput(encoding, [1], [1]).prompt_ids == ids


def test_a_response_ends_where_the_model_length_ends(
    runner: Callable[..., Any], rows: Any, tokenizer: Any
) -> None:
    engine = ScriptedRollout(["x" * 12], tokenizer=tokenizer)
    batch = runner(engine, "actor_rollout_ref.rollout.max_model_len=17").run(rows(["1+1=23456789"]))
    prompt = len(batch.batch["prompts"][0])
    assert tokenizer.decode(batch.batch["responses"][0]) == "x" * (17 - prompt)
    assert batch.non_tensor_batch["stop_reason"][0] == "length"


def test_a_request_has_the_priority_of_its_trajectory_unless_it_names_its_own(
    tokenizer: Any,
) -> None:
    engine = ScriptedRollout(["2", "3"], tokenizer=tokenizer)
    manager = ServerManager(engine, seed=0, max_tokens=6, priority=4)
    for own in ({}, {"priority": 0}):
        asyncio.run(manager.generate("a", prompt_ids=[3], sampling_params={}, **own))
    assert [request.priority for request in engine.requests] == [4, 0]
