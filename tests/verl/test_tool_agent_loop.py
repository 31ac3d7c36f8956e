"""Subclasses of verl's tool loop as its users write them: what they override is what runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hone.experimental.agent_loop.tool_agent_loop import (  # type: ignore[import-not-found]
    AgentData,
    AgentState,
    ToolAgentLoop,
)

from hone.agents.tools.contract import ToolResponse
from hone.protocol import DataProto
from hone.rollout.scripted import ScriptedRollout
from tests.agents.conftest import config as config
from tests.agents.conftest import rows as rows
from tests.agents.conftest import runner as runner
from tests.agents.conftest import tokenizer as tokenizer

TOOLS = """\
tools:
  - class_name: hone.agents.tools.gsm8k.Gsm8kTool
    config: {type: native}
"""
INTERACTIONS = """\
interaction:
  - name: gsm8k
    class_name: hone.agents.interactions.gsm8k.Gsm8kInteraction
"""
MULTI = "actor_rollout_ref.rollout.multi_turn"
TRUTH = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "42"}}}


def call_text(answer: str) -> str:
    call = {"name": "calc_gsm8k_reward", "arguments": {"answer": answer}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


LINES = [call_text("41"), call_text("42"), "#### 42"]


class Plain(ToolAgentLoop):  # type: ignore[misc]
    """Overrides nothing."""


class StopsAtItsWord(ToolAgentLoop):  # type: ignore[misc]
    """Ends a trajectory after the turn with a word of its own."""

    async def _handle_generating_state(
        self, agent_data: Any, sampling_params: Any, ignore_termination: bool = False
    ) -> AgentState:
        state = await super()._handle_generating_state(agent_data, sampling_params)
        text = self.tokenizer.decode(agent_data.response_ids, skip_special_tokens=True)
        agent_data.extra_fields["turns_seen"] = agent_data.assistant_turns
        return AgentState.TERMINATED if "42" in text else state


class GeneratesByHand(ToolAgentLoop):  # type: ignore[misc]
    """Generates and appends the tokens itself, without the base."""

    async def _handle_generating_state(
        self, agent_data: Any, sampling_params: Any, ignore_termination: bool = False
    ) -> AgentState:
        output = await self.server_manager.generate(
            request_id=agent_data.request_id,
            prompt_ids=agent_data.prompt_ids,
            sampling_params=sampling_params,
            image_data=agent_data.image_data,
        )
        agent_data.assistant_turns += 1
        agent_data.response_ids = output.token_ids
        agent_data.prompt_ids += agent_data.response_ids
        agent_data.response_mask += [1] * len(agent_data.response_ids)
        agent_data.response_logprobs += output.log_probs
        _, agent_data.tool_calls = await self.tool_parser.extract_tool_calls(output.token_ids)
        return AgentState.PROCESSING_TOOLS if agent_data.tool_calls else AgentState.TERMINATED


class HalvesRewards(ToolAgentLoop):  # type: ignore[misc]
    """Changes the reward and the text of the base's call."""

    async def _call_tool(self, tool_call: Any, tools_kwargs: Any, agent_data: Any) -> Any:
        assert json.loads(tool_call.arguments)["answer"] in ("41", "42")
        response, reward, metrics = await super()._call_tool(tool_call, tools_kwargs, agent_data)
        return ToolResponse(text=response.text.upper()), reward / 2, metrics


class CallsWithTwoArguments(ToolAgentLoop):  # type: ignore[misc]
    """Runs calls itself, with the arguments of verl before 0.6, and returns only an answer."""

    async def _call_tool(self, tool_call: Any, tools_kwargs: Any) -> Any:
        return ToolResponse(text=f"{tool_call.name} of {len(tools_kwargs)}")


class SkipsTools(ToolAgentLoop):  # type: ignore[misc]
    """Answers calls with text of its own."""

    async def _handle_processing_tools_state(self, agent_data: Any) -> AgentState:
        ids = self.tokenizer.encode("no tools today", add_special_tokens=False)
        agent_data.prompt_ids += ids
        agent_data.response_mask += [0] * len(ids)
        agent_data.response_logprobs += [0.0] * len(ids)
        agent_data.user_turns += 1
        return AgentState.GENERATING


class ChangesThePrompt(ToolAgentLoop):  # type: ignore[misc]
    """Adds a system message before the prompt is rendered."""

    async def _handle_pending_state(self, agent_data: Any, sampling_params: Any) -> AgentState:
        agent_data.messages.insert(0, {"role": "system", "content": "be brief"})
        return await super()._handle_pending_state(agent_data, sampling_params)


class RepliesItself(ToolAgentLoop):  # type: ignore[misc]
    """Has a user of its own."""

    async def _handle_interacting_state(self, agent_data: Any) -> AgentState:
        state = await super()._handle_interacting_state(agent_data)
        agent_data.extra_fields["replies"] = agent_data.user_turns
        return state


class AddsATool(ToolAgentLoop):  # type: ignore[misc]
    """Sets limits and parser of its own in the constructor."""

    def __init__(self, trainer_config: Any, server_manager: Any, tokenizer: Any, *a: Any, **k: Any):
        super().__init__(trainer_config, server_manager, tokenizer, *a, **k)
        assert trainer_config.config.actor_rollout_ref.rollout.multi_turn.enable
        self.max_assistant_turns = 2


class RunsTheStatesItself(ToolAgentLoop):  # type: ignore[misc]
    """Has verl's `run`, with a count of the states."""

    async def run(self, sampling_params: Any, **kwargs: Any) -> Any:
        from hone.experimental.agent_loop.agent_loop import (  # type: ignore[import-not-found]
            AgentLoopOutput,
        )

        data = AgentData(
            messages=list(kwargs["raw_prompt"]),
            image_data=None,
            video_data=None,
            metrics={},
            request_id=uuid4().hex,
            tools_kwargs=kwargs["tools_kwargs"],
        )
        states, state = [], AgentState.PENDING
        while state != AgentState.TERMINATED:
            states.append(state.value)
            if state == AgentState.PENDING:
                state = await self._handle_pending_state(data, sampling_params)
            elif state == AgentState.GENERATING:
                state = await self._handle_generating_state(data, sampling_params)
            else:
                state = await self._handle_processing_tools_state(data)
        response = data.prompt_ids[-len(data.response_mask) :]
        return AgentLoopOutput(
            prompt_ids=data.prompt_ids[: -len(data.response_mask)],
            response_ids=response,
            response_mask=data.response_mask,
            response_logprobs=data.response_logprobs,
            num_turns=data.user_turns + data.assistant_turns + 1,
            metrics=data.metrics,
            extra_fields={"states": states, "tool_rewards": data.tool_rewards},
        )


@pytest.fixture
def run_loop(
    runner: Callable[..., Any], rows: Any, tokenizer: Any, tmp_path: Path
) -> Callable[..., DataProto]:
    (tmp_path / "tools.yaml").write_text(TOOLS)
    (tmp_path / "interactions.yaml").write_text(INTERACTIONS)

    def run(loop: str, *overrides: str, lines: list[str] = LINES, **columns: Any) -> DataProto:
        name = loop if "_" in loop else f"{__name__}:{loop}"
        batch: DataProto = runner(
            ScriptedRollout(lines, tokenizer=tokenizer),
            *("data.prompt_format=chat", "data.max_response_length=900"),
            *("data.max_prompt_length=64", f"{MULTI}.enable=true"),
            f"{MULTI}.tool_config_path={tmp_path}/tools.yaml",
            f"actor_rollout_ref.rollout.agent.default_agent_loop={name}",
            *(override.replace("FOLDER", str(tmp_path)) for override in overrides),
        ).run(rows([[{"role": "user", "content": "6*7?"}]], tools_kwargs=[TRUTH], **columns))
        return batch

    return run


def response_text(tokenizer: Any, batch: DataProto) -> str:
    text: str = tokenizer.decode(batch.batch["responses"][0])
    return text


INTERACTION = f"{MULTI}.interaction_config_path=FOLDER/interactions.yaml"
KWARGS = {"interaction_kwargs": [{"name": "gsm8k", "ground_truth": "42"}]}


@pytest.mark.parametrize("has_interaction", [False, True])
def test_the_states_make_the_same_batch_as_hones_loop(
    run_loop: Callable[..., DataProto], has_interaction: bool
) -> None:
    overrides, columns = ([INTERACTION], KWARGS) if has_interaction else ([], {})
    lines = ["no <tool_call>{</tool_call>", *LINES, "41", "#### 42"]
    ours = run_loop("tool_agent", *overrides, lines=lines, **columns)
    states = run_loop("Plain", *overrides, lines=lines, **columns)
    for name in ("responses", "response_mask", "rollout_log_probs"):
        assert ours.batch[name].tolist() == states.batch[name].tolist()
    for name in ("tool_rewards", "turn_spans", "tool_outputs", "turn_scores", "tool_failures"):
        assert ours.non_tensor_batch[name].tolist() == states.non_tensor_batch[name].tolist()


def test_a_state_may_end_a_trajectory(run_loop: Callable[..., DataProto]) -> None:
    batch = run_loop("StopsAtItsWord")
    assert batch.non_tensor_batch["turns_seen"][0] == 2
    assert len(batch.non_tensor_batch["tool_rewards"][0]) == 1


def test_a_state_may_append_tokens_itself(run_loop: Callable[..., DataProto]) -> None:
    ours, by_hand = run_loop("tool_agent"), run_loop("GeneratesByHand")
    assert by_hand.batch["responses"].tolist() == ours.batch["responses"].tolist()
    assert by_hand.batch["response_mask"].tolist() == ours.batch["response_mask"].tolist()
    spans = by_hand.non_tensor_batch["turn_spans"][0]
    assert [span["mask"] for span in spans] == [1, 0, 1, 0, 1]


def test_a_call_may_change_reward_and_answer(
    run_loop: Callable[..., DataProto], tokenizer: Any
) -> None:
    ours, halved = run_loop("tool_agent"), run_loop("HalvesRewards")
    rewards = [reward / 2 for reward in ours.non_tensor_batch["tool_rewards"][0]]
    assert halved.non_tensor_batch["tool_rewards"][0] == rewards
    assert any(rewards)
    assert "CURRENT PARSED ANSWER" in response_text(tokenizer, halved)


@pytest.mark.parametrize(
    ("loop", "text"),
    [
        ("CallsWithTwoArguments", "calc_gsm8k_reward of 1"),
        ("SkipsTools", "no tools today"),
    ],
)
def test_a_subclass_may_answer_calls_itself(
    run_loop: Callable[..., DataProto], tokenizer: Any, loop: str, text: str
) -> None:
    assert response_text(tokenizer, run_loop(loop)).count(text) == 2


def test_a_subclass_may_change_the_prompt(
    run_loop: Callable[..., DataProto], tokenizer: Any
) -> None:
    batch = run_loop("ChangesThePrompt")
    assert "be brief" in tokenizer.decode(batch.batch["prompts"][0])


def test_a_subclass_may_extend_the_interaction(run_loop: Callable[..., DataProto]) -> None:
    batch = run_loop("RepliesItself", INTERACTION, lines=["41", "#### 42"], **KWARGS)
    assert batch.non_tensor_batch["replies"][0] == 1


def test_a_subclass_may_set_limits(run_loop: Callable[..., DataProto]) -> None:
    assert len(run_loop("AddsATool").non_tensor_batch["tool_rewards"][0]) == 1


def test_a_subclass_may_run_the_states_itself(run_loop: Callable[..., DataProto]) -> None:
    ours, states = run_loop("tool_agent"), run_loop("RunsTheStatesItself")
    assert states.batch["responses"].tolist() == ours.batch["responses"].tolist()
    assert states.non_tensor_batch["states"][0] == [
        *("pending", "generating", "processing_tools"),
        *("generating", "processing_tools", "generating"),
    ]
    assert len(states.non_tensor_batch["tool_rewards"][0]) == 2


def test_a_state_that_is_none_is_refused(run_loop: Callable[..., DataProto]) -> None:
    with pytest.raises(Exception, match="a state is None; return an AgentState"):
        run_loop("ReturnsNothing")


class ReturnsNothing(ToolAgentLoop):  # type: ignore[misc]
    async def _handle_pending_state(self, agent_data: Any, sampling_params: Any) -> None: ...
