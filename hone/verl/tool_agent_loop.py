"""verl's tool loop: hone's loop as verl's states, whose methods a subclass may override."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hone.agents.agent_data import AgentData as Trajectory
from hone.agents.contract import AgentLoopBase
from hone.agents.interactions.session import InteractionSession
from hone.agents.loops import tool
from hone.agents.parsers.contract import FunctionCall, ToolCall, as_function_call, as_tool_call
from hone.agents.tools.contract import ToolResponse, normalize_tool_return, response_text
from hone.agents.tools.session import CallAnswer, ToolSession
from hone.data.chat_template import BrokenTemplate
from hone.data.messages import Message, PromptError
from hone.data.prompts import truncate
from hone.text import error_text
from hone.types import Row, Settings
from hone.verl.agent_state import AgentData, AgentState

logger = logging.getLogger(__name__)


@dataclass
class ParsedCall(FunctionCall):
    """A call of the model's text; with an `error`, the model reads the error and no tool runs."""

    error: str | None = None


@dataclass
class Sessions:
    """The tools and the interaction of a trajectory."""

    tools: ToolSession
    interaction: InteractionSession | None
    deadline: float
    first_messages: list[Message] | None
    """The messages of the rendered prompt; None if `run` of a subclass has not rendered it."""


class ToolAgentLoop(tool.ToolAgentLoop):
    """Runs each trajectory through the methods `_handle_…_state` and `_call_tool`."""

    runs_states = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        limits = self.multi_turn
        self.tools = dict(self.tools)  # a subclass may add tools
        self.tool_schemas: list[dict[str, Any]] = [
            one.tool_schema.model_dump() for one in self.tools.values()
        ]
        self.tool_parser, self.tool_parser_name = self.parser, self.format
        self.max_user_turns = limits.max_user_turns
        self.max_assistant_turns = limits.max_assistant_turns
        self.max_parallel_calls = limits.max_parallel_calls
        self.max_tool_response_length = limits.max_tool_response_length
        self.tool_response_truncate_side = limits.tool_response_truncate_side
        self.interaction_config_file = limits.interaction_config_path
        self.interaction_map = self.interactions
        self._sessions: Sessions | None = None
        self._initial_parser, self._initial_schemas = self.parser, list(self.tool_schemas)

    # -- the states ------------------------------------------------------------------------------

    async def _run_turns(
        self,
        agent_data: Trajectory,
        tool_session: ToolSession,
        interaction: InteractionSession | None,
        deadline: float,
        sampling_params: Settings,
    ) -> None:
        """Runs the states until the trajectory is terminated."""
        assert isinstance(agent_data, AgentData)
        self._sessions = Sessions(tool_session, interaction, deadline, list(agent_data.messages))
        state = AgentState.PENDING
        while state is not AgentState.TERMINATED:
            if state is AgentState.PENDING:
                state = await self._handle_pending_state(agent_data, sampling_params)
            elif state is AgentState.GENERATING:
                state = await self._handle_generating_state(agent_data, sampling_params)
            elif state is AgentState.PROCESSING_TOOLS:
                state = await self._handle_processing_tools_state(agent_data)
            elif state is AgentState.INTERACTING:
                state = await self._handle_interacting_state(agent_data)
            else:
                raise TypeError(
                    f"{type(self).__name__}: a state is {state!r}; return an AgentState"
                )
        agent_data.complete()

    async def _handle_pending_state(
        self, agent_data: AgentData, sampling_params: Settings
    ) -> AgentState:
        """Renders the prompt again if a subclass has changed messages, schemas or the rendering."""
        is_unchanged = (
            agent_data.messages == self._sessions_of(agent_data).first_messages
            and self.tool_schemas == self._initial_schemas
            and not self._has_own_rendering()
        )
        if not is_unchanged:
            tools = self.tool_schemas if self.parser.template_renders_tools else None
            ids = await self.apply_chat_template(agent_data.messages, tools=tools or None)
            limit, truncation = self._hone.prompt_length, self.config.data.truncation
            agent_data.prompt_ids = truncate(list(ids), limit, truncation)
        return AgentState.GENERATING

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: Settings, ignore_termination: bool = False
    ) -> AgentState:
        """Generates a turn and reads its calls."""
        text, ids = await self._generate_turn(agent_data, sampling_params)
        sessions = self._sessions_of(agent_data)
        interaction = sessions.interaction
        is_unanswered = self._is_last_turn(agent_data) and not (
            interaction and interaction.is_environment
        )
        is_full = not ids or self._remaining_tokens(agent_data) <= 0
        if is_unanswered or (is_full and not ignore_termination):
            return AgentState.TERMINATED
        if time.monotonic() > sessions.deadline:
            sessions.tools.timeouts.append("trajectory")
            return AgentState.TERMINATED
        calls = await self._parse_calls(text, ids)
        agent_data.tool_calls = [
            ParsedCall(**vars(as_function_call(call)), error=call.error) for call in calls
        ]
        if calls and self._is_last_turn(agent_data):
            return AgentState.TERMINATED
        if calls:
            return AgentState.PROCESSING_TOOLS
        return AgentState.TERMINATED if interaction is None else AgentState.INTERACTING

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        """Runs the calls and appends their answers."""
        calls = [_tool_call(call) for call in agent_data.tool_calls]
        for turn in agent_data.turn_spans[-1:]:
            turn["calls"] = len(calls)
        start_time = time.perf_counter()
        if type(self)._call_tool is ToolAgentLoop._call_tool:
            answers = await self._sessions_of(agent_data).tools.run_calls(calls)
        else:
            answers = await self._call_own(agent_data, calls)
        if self._sessions is None:  # `run` of a subclass releases nothing at the end
            await self._sessions_of(agent_data).tools.release()
        agent_data.seconds["tools"] += time.perf_counter() - start_time
        return await self._append(agent_data, [*map(tool.tool_message, calls, answers)])

    async def _handle_interacting_state(self, agent_data: AgentData) -> AgentState:
        """Appends the reply of the interaction to the last turn."""
        sessions = self._sessions_of(agent_data)
        interaction = sessions.interaction
        if interaction is None:
            return AgentState.TERMINATED
        num_scores = len(interaction.turn_scores)
        remaining_s = sessions.deadline - time.monotonic()
        reply = await interaction.reply(agent_data.messages, remaining_s)
        if len(interaction.turn_scores) > num_scores:
            for turn in agent_data.turn_spans[-1:]:
                turn["score"] = interaction.turn_scores[-1]
            agent_data.add_reward(interaction.name, interaction.turn_scores[-1])
        if reply is None or self._is_last_turn(agent_data):
            return AgentState.TERMINATED
        return await self._append(agent_data, [{"role": "user", "content": reply}])

    async def _call_tool(
        self, tool_call: FunctionCall, tools_kwargs: Settings, agent_data: AgentData
    ) -> tuple[ToolResponse, float | None, Settings]:
        """Runs one call; returns its answer, reward and metrics."""
        (answer,) = await self._sessions_of(agent_data).tools.answer_calls([_tool_call(tool_call)])
        return ToolResponse(answer.text), answer.reward, answer.metrics

    # -- what the states share -------------------------------------------------------------------

    async def _call_own(self, agent_data: AgentData, calls: Sequence[ToolCall]) -> list[str]:
        """Runs the calls with the `_call_tool` of a subclass, at most `max_parallel_calls` of them."""
        arguments: list[Any] = [agent_data.tools_kwargs, agent_data]
        if len(inspect.signature(self._call_tool).parameters) == 2:  # verl before 0.6
            arguments = arguments[:1]
        limit = self.max_parallel_calls
        results = await asyncio.gather(
            *(self._call_tool(call, *arguments) for call in agent_data.tool_calls[:limit])
        )
        texts = []
        for call, result in zip(calls, results, strict=False):
            has_reward = isinstance(result, tuple) and len(result) > 1 and result[1] is not None
            response, reward, metrics = normalize_tool_return(result)
            if response.image or response.video:
                raise PromptError(f"{call.name} returned images or video; return text only")
            texts.append(response_text(response))
            answer = CallAnswer(texts[-1], reward if has_reward else None, metrics)
            self._sessions_of(agent_data).tools.record(call, answer)
        return texts

    async def _append(self, agent_data: AgentData, messages: list[Message]) -> AgentState:
        """Appends messages to the trajectory; terminates it where they do not fit."""
        try:
            if self._has_own_rendering():
                ids: Sequence[int] = await self.apply_chat_template(
                    messages, remove_system_prompt=True
                )
            else:
                skips = not self.parser.template_renders_tools
                text = self.tokenizer.decode(agent_data.response_ids, skip_special_tokens=skips)
                ids = self._observation_ids(messages, text, agent_data.prompt_ids[-1])
        except (PromptError, BrokenTemplate) as error:  # the answer is third-party text
            logger.warning("the answer cannot be rendered: %s", error_text(error))
            self._sessions_of(agent_data).tools.failures += 1
            return AgentState.TERMINATED
        if not messages or len(ids) >= self._remaining_tokens(agent_data):
            return AgentState.TERMINATED
        agent_data.add_observation(ids, messages[0]["role"])
        agent_data.messages += messages
        return AgentState.GENERATING

    def _sessions_of(self, agent_data: AgentData) -> Sessions:
        """Returns the trajectory's sessions, which a subclass with its own `run` has not made."""
        if self._sessions is not None:
            return self._sessions
        if agent_data.sessions is None:
            interaction = None
            if agent_data.interaction is not None:
                timeout_s = self.multi_turn.tool_timeout_s
                interaction = InteractionSession(
                    *(agent_data.interaction, agent_data.interaction_kwargs, timeout_s),
                    instance_id=agent_data.request_id,
                )
            tools = self._tool_session(agent_data)
            agent_data.sessions = Sessions(tools, interaction, float("inf"), None)
        sessions: Sessions = agent_data.sessions
        return sessions

    def _has_own_rendering(self) -> bool:
        return type(self).apply_chat_template is not AgentLoopBase.apply_chat_template

    def _is_last_turn(self, agent_data: AgentData) -> bool:
        turns, replies = self.max_assistant_turns, self.max_user_turns
        return bool(
            (turns and agent_data.assistant_turns >= turns)
            or (replies and agent_data.user_turns >= replies)
        )

    def _remaining_tokens(self, agent_data: Trajectory) -> int:
        limit = self.response_length - len(agent_data.response_mask)
        return min(super()._remaining_tokens(agent_data), limit)

    def _start_trajectory(
        self, row: Row, observation: str | None, interaction: InteractionSession | None
    ) -> AgentData:
        if self.tool_parser is not self._initial_parser:
            self.parser = self.tool_parser
        started = super()._start_trajectory(row, observation, interaction)
        kwargs = row.get("interaction_kwargs") or {}
        name = kwargs.get("name") or next(iter(self.interactions), "")
        agent_data = AgentData(
            *(started.messages, None, None, {}, started.request_id, started.tools_kwargs),
            self.interactions.get(name) if interaction else None,
            kwargs,
        )
        vars(agent_data).update(vars(started))
        return agent_data

    def _tool_session(self, agent_data: Trajectory) -> ToolSession:
        self.multi_turn = replace(
            self.multi_turn,
            max_parallel_calls=self.max_parallel_calls,
            max_tool_response_length=self.max_tool_response_length,
            tool_response_truncate_side=self.tool_response_truncate_side,
        )
        return super()._tool_session(agent_data)


def _tool_call(call: FunctionCall) -> ToolCall:
    """Returns hone's form of a call of a parser or of a subclass."""
    parsed = as_tool_call(call.name, call.arguments, getattr(call, "tool_call_id", None))
    error = getattr(call, "error", None)
    return parsed if error is None else replace(parsed, error=error)
