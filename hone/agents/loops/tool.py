"""The tool loop: model turns alternate with tool answers or a simulated user's messages.

Tool and user messages are appended as tokens with mask 0. A trajectory ends with a turn without calls,
when the interaction ends it, or at a limit of `rollout.multi_turn`.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import UnionType
from typing import Any

from hone.agents.agent_data import AgentData
from hone.agents.contract import AgentLoopBase, AgentLoopOutput
from hone.agents.interactions.contract import BaseInteraction
from hone.agents.interactions.environment import EnvironmentInteraction
from hone.agents.interactions.session import InteractionSession
from hone.agents.observations import (
    observation_ids,
    render_with_observation,
    truncate_text,
    truncate_tokens,
)
from hone.agents.parsers.contract import ToolCall, ToolParser
from hone.agents.tools.contract import ToolError
from hone.agents.tools.loading import Tool, initialize_interactions_from_config, load_all_tools
from hone.agents.tools.session import ToolSession
from hone.config.rollout import MultiTurnConfig
from hone.data.chat_template import BrokenTemplate
from hone.data.messages import Message, PromptError, as_messages
from hone.data.prompts import raw_text, truncate
from hone.event_loop import run_coroutine
from hone.text import error_text, short_repr
from hone.types import Fields, Row, Settings

logger = logging.getLogger(__name__)

TOOL_CONFIG_KEYS = ("available_tools", "tool_format", "max_tool_calls", "timeout")
"""The keys of a row's `tool_config`."""
_TOOL_FORMATS = ("react", "function_calling")


class ToolAgentLoop(AgentLoopBase):
    """The loop `tool_agent`; a row's `tool_config` overrides the limits of `rollout.multi_turn`."""

    default_format: str | None = None
    """The parser name that a subclass uses instead of `multi_turn.format`."""

    runs_states = False
    """Whether the class runs verl's states."""

    def __init_subclass__(cls) -> None:
        overrides = sorted(name for name in vars(cls) if name.startswith("_handle_"))
        if overrides and not cls.runs_states:
            raise TypeError(
                f"{cls.__name__} overrides {overrides[0]}, a state of verl's tool loop, which this class "
                "does not have; import ToolAgentLoop from hone.experimental.agent_loop.tool_agent_loop"
            )

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        multi_turn: MultiTurnConfig = self.config.actor_rollout_ref.rollout.multi_turn
        self.multi_turn = multi_turn
        self.format = self.default_format or multi_turn.format
        self.tools = _load_tools(multi_turn.tool_config_path, multi_turn.function_tool_path)
        self.interactions = _load_interactions(multi_turn.interaction_config_path)
        self.parser = ToolParser.get_tool_parser(self.format, self.tokenizer)
        self._has_tool_subset = False
        self._hone.problems = self._environment_problems

    def settings_of_row(
        self, tool_config: Settings | None
    ) -> tuple[dict[str, Tool], MultiTurnConfig, ToolParser]:
        """Returns a row's tools, config and parser; raises ToolError on a bad `tool_config`."""
        options = {name: value for name, value in (tool_config or {}).items() if value is not None}
        if unknown := sorted(set(options) - set(TOOL_CONFIG_KEYS)):
            raise ToolError(f"tool_config has no {unknown[0]!r}; use {', '.join(TOOL_CONFIG_KEYS)}")
        names = options.get("available_tools", [*self.tools])
        key = "tool_config.available_tools"
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise ToolError(f"{key}={short_repr(names)}; give a list of names")
        if unknown_tools := [name for name in names if name not in self.tools]:
            tools = ", ".join(self.tools) or "none"
            raise ToolError(
                f"{key} names {short_repr(unknown_tools[0])}; the tools of this run are {tools}"
            )
        default_tool_format = "react" if self.format == "react" else "function_calling"
        tool_format = options.get("tool_format", default_tool_format)
        if tool_format not in _TOOL_FORMATS:
            formats = " or ".join(_TOOL_FORMATS)
            raise ToolError(f"tool_config.tool_format={short_repr(tool_format)}; give {formats}")
        max_calls, timeout_s = options.get("max_tool_calls", 0), options.get("timeout", 1)
        if not _is_number(max_calls, int) or max_calls < 0:
            raise ToolError(f"tool_config.max_tool_calls={short_repr(max_calls)}; give a count")
        if not _is_number(timeout_s, int | float) or not timeout_s > 0:  # NaN is not > 0
            raise ToolError(f"tool_config.timeout={short_repr(timeout_s)}; give seconds")
        parser = self.parser
        if tool_format != default_tool_format:
            format_name = self.multi_turn.format
            function_calling_parser = "hermes" if format_name == "react" else format_name
            parser_name = "react" if tool_format == "react" else function_calling_parser
            parser = ToolParser.get_tool_parser(parser_name, self.tokenizer)
        multi_turn = replace(
            self.multi_turn,
            max_tool_calls=options.get("max_tool_calls", self.multi_turn.max_tool_calls),
            tool_timeout_s=options.get("timeout", self.multi_turn.tool_timeout_s),
        )
        return {name: self.tools[name] for name in names}, multi_turn, parser

    def _environment_problems(self) -> Iterator[str]:
        """Yields a problem for each environment that cannot be created."""
        for name, interaction in self.interactions.items():
            if isinstance(interaction, EnvironmentInteraction):
                try:
                    run_coroutine(interaction.check_creation())
                except Exception as error:  # an environment is user code
                    yield f"the environment {name} cannot be made: {error_text(error)}"

    async def run(self, sampling_params: Fields, **row: Any) -> AgentLoopOutput:
        if tool_config := row.get("tool_config"):
            self.tools, self.multi_turn, self.parser = self.settings_of_row(tool_config)
            self._has_tool_subset = tool_config.get("available_tools") is not None
        timeout_s = self.multi_turn.trajectory_timeout_s
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        interaction = self._interaction_session(row)
        async with AsyncExitStack() as exit_stack:
            observation = None
            if interaction is not None:
                exit_stack.push_async_callback(interaction.release)
                observation = await interaction.start(deadline - time.monotonic())
            agent_data = self._start_trajectory(row, observation, interaction)
            agent_data.turn_scores = interaction.turn_scores if interaction else []
            tool_session = self._tool_session(agent_data)
            exit_stack.push_async_callback(tool_session.release)
            await self._run_turns(agent_data, tool_session, interaction, deadline, sampling_params)
            scores = await tool_session.scores()
            if interaction is not None:
                score = await interaction.score()
                if score is not None:
                    scores[interaction.name] = score
        extra_fields = agent_data.extra_fields | {
            "tool_outputs": tool_session.outputs,
            "tool_rewards": agent_data.tool_rewards,
            "turn_scores": agent_data.turn_scores,
            "turn_rewards": agent_data.turn_rewards,
            "timeouts": [*tool_session.timeouts, *(interaction.timeouts if interaction else [])],
            "tool_call_counts": len(tool_session.outputs),
            "tool_failures": tool_session.failures + (interaction.failures if interaction else 0),
            "reward_scores": scores,
            "turn_spans": agent_data.turn_spans,
        }
        return agent_data.to_output(extra_fields)

    def whole_prompt(
        self, prompt: str | list[Message], tool_config: Settings | None = None
    ) -> tuple[str | list[Message], list[Settings]]:
        """Returns (prompt, tool schemas for the chat template).

        If the parser rather than the template describes the tools, the prompt has its instructions.
        """
        tools, _, parser = self.settings_of_row(tool_config)
        schemas = [tool.tool_schema for tool in tools.values()]
        if schemas and not parser.template_renders_tools:
            return _add_instructions(prompt, parser.instructions(schemas)), []
        return prompt, [schema.model_dump() for schema in schemas]

    def _start_trajectory(
        self, row: Row, observation: str | None, interaction: InteractionSession | None
    ) -> AgentData:
        """Returns a trajectory with the rendered prompt and an environment's first observation."""
        prompt, template_tools = self.whole_prompt(row["raw_prompt"], row.get("tool_config"))
        messages = [dict(message) for message in as_messages(prompt)]
        agent_data = AgentData(messages, [], row["trajectory_id"], row.get("tools_kwargs") or {})
        if observation is not None and interaction is not None:
            is_raw = self.data_config.get("prompt_format", "chat") == "raw"
            try:
                agent_data.prompt_ids, text = render_with_observation(
                    raw_text(prompt) if is_raw else messages,
                    observation,
                    lambda full_prompt: self._hone.render(full_prompt, template_tools or None),
                    self.tokenizer,
                    self._hone.prompt_length,
                    self.multi_turn.tool_response_truncate_side,
                )
                agent_data.messages.append({"role": "user", "content": text})
                agent_data.extra_fields["env/truncated_observations"] = int(text != observation)
                return agent_data
            except (PromptError, BrokenTemplate) as error:  # the observation is third-party text
                interaction.record_failure("reset", error)
        if prompt is row["raw_prompt"] and not self._has_tool_subset:
            ids = self._hone.prompt_ids(row, template_tools)
        else:
            ids = self._hone.render(prompt, template_tools or None)
        agent_data.prompt_ids = truncate(ids, self._hone.prompt_length, self.config.data.truncation)
        return agent_data

    async def _run_turns(
        self,
        agent_data: AgentData,
        tool_session: ToolSession,
        interaction: InteractionSession | None,
        deadline: float,
        sampling_params: Settings,
    ) -> None:
        """Alternates model turns with tool answers or the interaction's replies, until a limit."""
        while True:
            text, ids = await self._generate_turn(agent_data, sampling_params)
            is_last_turn = (
                agent_data.assistant_turns == self.multi_turn.max_assistant_turns
                or agent_data.user_turns == self.multi_turn.max_user_turns
            )
            is_unanswered = is_last_turn and not (interaction and interaction.is_environment)
            if not ids or is_unanswered or self._remaining_tokens(agent_data) <= 0:
                return
            if time.monotonic() > deadline:
                tool_session.timeouts.append("trajectory")
                return
            calls = await self._parse_calls(text, ids)
            if calls and is_last_turn:
                return
            if calls:
                agent_data.turn_spans[-1]["calls"] = len(calls)
                start_time = time.perf_counter()
                answers = await tool_session.run_calls(calls)
                agent_data.seconds["tools"] += time.perf_counter() - start_time
                new_messages = list(map(tool_message, calls, answers))
            elif interaction is not None:
                num_scores = len(interaction.turn_scores)
                reply = await interaction.reply(agent_data.messages, deadline - time.monotonic())
                if len(interaction.turn_scores) > num_scores:
                    agent_data.turn_spans[-1]["score"] = interaction.turn_scores[-1]
                    agent_data.add_reward(interaction.name, interaction.turn_scores[-1])
                if reply is None or is_last_turn:
                    return
                new_messages = [{"role": "user", "content": reply}]
            else:
                return
            try:
                observation = self._observation_ids(new_messages, text, agent_data.prompt_ids[-1])
            except (PromptError, BrokenTemplate) as error:  # the answer is third-party text
                logger.warning("the answer cannot be rendered: %s", error_text(error))
                tool_session.failures += 1
                return
            if len(observation) >= self._remaining_tokens(agent_data):
                return
            agent_data.add_observation(observation, new_messages[0]["role"])
            agent_data.messages += new_messages

    async def _parse_calls(self, text: str, ids: Sequence[int]) -> list[ToolCall]:
        """Returns the calls in the model's text; a parser error becomes one failed call."""
        if not self.tools:
            return []
        try:
            schemas = [tool.tool_schema for tool in self.tools.values()]
            return list(await self.parser.parse(text, ids, schemas))
        except Exception as error:  # a parser may be user code, and the text is untrusted
            logger.warning("the tool-call parser failed: %s", error_text(error))
            return [ToolCall("", {}, f"the calls cannot be parsed: {error_text(error)}")]

    async def _generate_turn(
        self, agent_data: AgentData, sampling_params: Settings
    ) -> tuple[str, list[int]]:
        """Generates one model turn; returns (text for the parser, token ids)."""
        max_tokens = self._remaining_tokens(agent_data)
        if sampling_params.get("max_tokens") is not None:
            max_tokens = min(sampling_params["max_tokens"], max_tokens)
        start_time = time.perf_counter()
        output = await self.server_manager.generate(
            agent_data.request_id,
            prompt_ids=list(agent_data.prompt_ids),
            sampling_params={
                **sampling_params,
                "max_tokens": max_tokens,
                "stop": (*(sampling_params.get("stop") or ()), *self.parser.stop),
                "stop_token_ids": (
                    *(sampling_params.get("stop_token_ids") or ()),
                    *self.parser.stop_token_ids,
                ),
            },
        )
        agent_data.seconds["model"] += time.perf_counter() - start_time
        agent_data.add_turn(output)
        content = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        agent_data.messages.append({"role": "assistant", "content": content})
        if self.parser.template_renders_tools:
            return self.tokenizer.decode(output.token_ids), output.token_ids
        return content, output.token_ids

    def _remaining_tokens(self, agent_data: AgentData) -> int:
        response_tokens = len(agent_data.response_mask)
        prompt_tokens = len(agent_data.prompt_ids) - response_tokens
        return self._hone.response_limit(prompt_tokens) - response_tokens

    def _observation_ids(self, messages: list[Message], text: str, last_id: int) -> Sequence[int]:
        """Returns the ids of tool or user messages after the model turn `text` with last id `last_id`."""
        if messages[0]["role"] == "tool" and not self.parser.template_renders_tools:
            observation = self.parser.observation(
                text, [message["content"] for message in messages]
            )
            # If the last token is not a special token, the model's turn goes on after the observation.
            if self.tokenizer.decode([last_id], skip_special_tokens=True):
                return self.tokenizer.encode(observation, add_special_tokens=False)
            messages = [{"role": "user", "content": observation.strip()}]
        return observation_ids(
            messages,
            self.tokenizer,
            last_token=last_id,
            template_kwargs=self.config.data.apply_chat_template_kwargs,
            chat=self.config.data.prompt_format == "chat",
        )

    def _tool_session(self, agent_data: AgentData) -> ToolSession:
        """Returns a session that runs the calls of this trajectory within the configured limits."""
        limits = self.multi_turn
        side = limits.tool_response_truncate_side

        def truncate_answer(text: str) -> str:
            text = truncate_text(text, limits.max_tool_response_length, side)
            return truncate_tokens(text, self.tokenizer, limits.max_observation_tokens, side)

        return ToolSession(
            self.tools,
            agent_data,
            limits.max_parallel_calls,
            limits.max_tool_calls,
            limits.tool_timeout_s,
            truncate_answer,
        )

    def _interaction_session(self, row: Row) -> InteractionSession | None:
        """Returns a session with the row's interaction (by default, the first); None without one."""
        kwargs = row.get("interaction_kwargs") or {}
        if not self.interactions or not kwargs:
            return None
        name = kwargs.get("name") or next(iter(self.interactions))
        if not isinstance(name, str) or name not in self.interactions:
            raise ValueError(
                f"the row's interaction_kwargs.name={short_repr(name)} is not in "
                f"{self.multi_turn.interaction_config_path}; it has {', '.join(self.interactions)}"
            )
        return InteractionSession(self.interactions[name], kwargs, self.multi_turn.tool_timeout_s)


class ReactAgentLoop(ToolAgentLoop):
    """The loop `react_agent`; the prompt explains the format of Thought, Action and Observation."""

    default_format = "react"


def _is_number(value: Any, types: type | UnionType) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


def _add_instructions(prompt: str | list[Message], text: str) -> str | list[Message]:
    """Adds instructions to the prompt: in the system message, or before the first message."""
    if isinstance(prompt, str):
        return f"{text}\n\n{prompt}"
    messages = [dict(message) for message in as_messages(prompt)]
    first = messages[0]
    if not isinstance(first["content"], str):
        return [{"role": "system", "content": text}, *messages]
    if first["role"] == "system":
        first["content"] = f"{first['content']}\n\n{text}"
    else:
        first["content"] = f"{text}\n\n{first['content']}"
    return messages


def tool_message(call: ToolCall, answer: str) -> Message:
    """Returns the message with a tool's answer; a malformed call may have no name and no id."""
    message: Message = {"role": "tool", "content": answer}
    if call.name:
        message["name"] = call.name
    if call.tool_call_id:
        message["tool_call_id"] = call.tool_call_id
    return message


@functools.cache
def _load_tools(tool_config_path: str | None, function_tool_path: str | None) -> dict[str, Tool]:
    """Loads the tools once per process, since a tool may hold a connection pool."""
    return {tool.name: tool for tool in load_all_tools(tool_config_path, function_tool_path)}


@functools.cache
def _load_interactions(path: str | None) -> dict[str, BaseInteraction]:
    return initialize_interactions_from_config(path) if path else {}
