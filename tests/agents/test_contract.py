"""The engine client of a trajectory, and the default loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from hone.agents.contract import AgentLoopBase, AgentLoopOutput, ServerManager
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


class BusyLoop(AgentLoopBase):
    """Uses for itself every name that loops of hone read of their context."""

    prompt_length = property(lambda self: 1)  # type: ignore[assignment]
    request_id = property(lambda self: "mine")  # type: ignore[assignment]
    dataset_config = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.problems = ["none of hone's"]
        self.prompt_ids: list[int] = []
        self.response_limit, self.response_length, self._render = 3, 4, "text"

    async def run(self, sampling_params: Any, **row: Any) -> AgentLoopOutput:
        self.prompt_ids = await self.apply_chat_template(row["raw_prompt"])
        output = await self.server_manager.generate(
            self.request_id, prompt_ids=self.prompt_ids, sampling_params=sampling_params
        )
        ids = output.token_ids
        return AgentLoopOutput(self.prompt_ids, ids, [1] * len(ids), num_turns=2)


def test_a_loop_may_use_any_name_that_verls_base_has_not(
    runner: Callable[..., Any], rows: Any, tokenizer: Any
) -> None:
    loop = f"actor_rollout_ref.rollout.agent.default_agent_loop={__name__}:BusyLoop"
    batch = runner(ScriptedRollout(["42"], tokenizer=tokenizer), loop).run(rows(["6*7="]))
    assert tokenizer.decode(batch.batch["responses"][0]).startswith("42")


def test_the_base_of_loops_has_only_names_of_verl() -> None:
    names = {name for name in vars(AgentLoopBase) if not name.startswith("__")}
    assert names - {"_hone", "_abc_impl"} == {
        *("_class_initialized", "init_class", "run", "apply_chat_template", "system_prompt"),
        *("apply_chat_template_kwargs", "process_vision_info", "process_multi_modal_info"),
        *("ct_build_initial_tokens", "ct_merge_context_msg", "ct_merge_assistant_token"),
    }
