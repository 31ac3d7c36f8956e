"""The tool loop: model turns alternate with tool answers or with a simulated user's turns.

Tool and user turns are appended as tokens with mask 0. A trajectory ends with a turn without calls, when
the user ends it, or at a limit of `rollout.multi_turn`. Images in tool answers are not supported.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from hone.agents.agent_data import AgentData, AgentState
from hone.agents.contract import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from hone.agents.interactions.contract import BaseInteraction
from hone.agents.interactions.environment import EnvironmentInteraction
from hone.agents.interactions.listing import initialize_interactions_from_config
from hone.agents.interactions.session import InteractionSession
from hone.agents.observations import cut_text, cut_tokens, observation_ids, with_observation
from hone.agents.parsers.contract import ToolCall, ToolParser
from hone.agents.tools.contract import ToolError
from hone.agents.tools.listing import Tool, load_all_tools
from hone.agents.tools.session import CallLimits, ToolSession
from hone.config.rollout import MultiTurnConfig
from hone.data.chat_template import BrokenTemplate
from hone.data.prompts import Message, PromptError, as_messages, raw_text, truncate
from hone.event_loop import run_coroutine
from hone.text import described, shown
from hone.types import Row, Settings

__all__ = ["AgentData", "AgentState", "ReactAgentLoop", "ToolAgentLoop"]
logger = logging.getLogger(__name__)

TOOL_CONFIG = ("available_tools", "tool_format", "max_tool_calls", "timeout")
"""Keys of a row's `tool_config`."""
_FORMATS = ("react", "function_calling")


class ToolAgentLoop(AgentLoopBase):
    """Named `tool_agent` in rows; a row's `tool_config` overrides the limits of `rollout.multi_turn`."""

    default_format: str | None = None
    """The parser that replaces `multi_turn.format`, if any."""

    def __init_subclass__(cls) -> None:
        steps = sorted(name for name in vars(cls) if name.startswith("_handle_"))
        if steps:
            raise TypeError(
                f"{cls.__name__} overrides {steps[0]}, a step of verl's tool loop that is not called "
                "here; override run, or derive from AgentLoopBase"
            )

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        limits: MultiTurnConfig = self.config.actor_rollout_ref.rollout.multi_turn
        self.limits = limits
        self.format = self.default_format or limits.format
        self.tools = _tools(limits.tool_config_path, limits.function_tool_path)
        self.interactions = _interactions(limits.interaction_config_path)
        self.parser = ToolParser.get_tool_parser(self.format, self.tokenizer)
        self._restricted = False

    def of_row(
        self, tool_config: Settings | None
    ) -> tuple[dict[str, Tool], MultiTurnConfig, ToolParser]:
        """Returns a row's tools, limits and parser; raises ToolError on an invalid `tool_config`."""
        options = {name: value for name, value in (tool_config or {}).items() if value is not None}
        if unknown := sorted(set(options) - set(TOOL_CONFIG)):
            raise ToolError(f"tool_config has no {unknown[0]!r}; use {', '.join(TOOL_CONFIG)}")
        names = options.get("available_tools", [*self.tools])
        if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
            raise ToolError(f"tool_config.available_tools={shown(names)}; give a list of names")
        if missing := [name for name in names if name not in self.tools]:
            raise ToolError(
                f"tool_config.available_tools names {shown(missing[0])}; the tools of this run are "
                f"{', '.join(self.tools) or 'none'}"
            )
        kind = options.get("tool_format", _FORMATS[self.format != "react"])
        calls, seconds = options.get("max_tool_calls", 0), options.get("timeout", 1.0)
        for name, value, holds, rule in (
            ("tool_format", kind, kind in _FORMATS, " or ".join(_FORMATS)),
            ("max_tool_calls", calls, isinstance(calls, int) and calls >= 0, "a count"),
            ("max_tool_calls", calls, not isinstance(calls, bool), "a count"),
            ("timeout", seconds, isinstance(seconds, int | float) and seconds > 0, "seconds"),
            ("timeout", seconds, not isinstance(seconds, bool), "seconds"),
        ):
            if not holds:
                raise ToolError(f"tool_config.{name}={shown(value)}; give {rule}")
        parser = self.parser
        if kind != _FORMATS[self.format != "react"]:
            by_template = "hermes" if self.limits.format == "react" else self.limits.format
            name = "react" if kind == "react" else by_template
            parser = ToolParser.get_tool_parser(name, self.tokenizer)
        limits = replace(
            self.limits,
            max_tool_calls=options.get("max_tool_calls", self.limits.max_tool_calls),
            tool_timeout_s=options.get("timeout", self.limits.tool_timeout_s),
        )
        return {name: self.tools[name] for name in names}, limits, parser

    def problems(self) -> Iterator[str]:
        """Reports environments that cannot be made."""
        for name, interaction in self.interactions.items():
            if isinstance(interaction, EnvironmentInteraction):
                try:
                    run_coroutine(interaction.try_once())
                except Exception as error:  # an environment is user code
                    yield f"the environment {name} cannot be made: {described(error)}"

    async def run(self, sampling_params: Row, **row: Any) -> AgentLoopOutput:
        if row.get("tool_config"):
            self.tools, self.limits, self.parser = self.of_row(row["tool_config"])
            self._restricted = row["tool_config"].get("available_tools") is not None
        seconds = self.limits.trajectory_timeout_s
        deadline = float("inf") if seconds is None else time.monotonic() + seconds
        user = self._user_of(row)
        async with AsyncExitStack() as ending:
            first = None
            if user is not None:
                ending.push_async_callback(user.finish)
                first = await user.start(deadline - time.monotonic())
            talk = self._begin(row, first, user)
            talk.turn_scores = user.turn_scores if user else []
            session = ToolSession(self.tools, talk, self._call_limits())
            ending.push_async_callback(session.release)
            await self._converse(talk, session, user, deadline, sampling_params)
            scores = await session.scores()
            if user is not None and (score := await user.score()) is not None:
                scores[user.name] = score
        return self._output(talk, session, user, scores)

    def whole_prompt(
        self, prompt: str | list[Message], tool_config: Settings | None = None
    ) -> tuple[str | list[Message], list[Settings]]:
        """Returns the prompt with the parser's instructions, and the schemas that the template shows."""
        tools, _, parser = self.of_row(tool_config)
        schemas = [tool.tool_schema for tool in tools.values()]
        if schemas and not parser.in_template:
            return _with_instructions(prompt, parser.instructions(schemas)), []
        return prompt, [schema.model_dump() for schema in schemas]

    def _begin(
        self, row: Row, first: str | None, user: InteractionSession | None = None
    ) -> AgentData:
        """Renders the prompt with the parser's instructions and an environment's first observation."""
        prompt, shown_tools = self.whole_prompt(row["raw_prompt"], row.get("tool_config"))
        messages = [dict(message) for message in as_messages(prompt)]
        talk = AgentData(messages, [], row["trajectory_id"], row.get("tools_kwargs") or {})
        if first is not None and user is not None:
            is_raw = self.data_config.get("prompt_format", "chat") == "raw"
            try:
                talk.prompt_ids, text = with_observation(
                    raw_text(prompt) if is_raw else messages,
                    first,
                    lambda whole: self._rendered(whole, shown_tools or None),
                    self.tokenizer,
                    self.prompt_length,
                    self.limits.tool_response_truncate_side,
                )
                talk.messages.append({"role": "user", "content": text})
                talk.extra_fields["env/truncated_observations"] = int(text != first)
                return talk
            except (PromptError, BrokenTemplate) as error:  # the observation is third-party text
                user.fail("reset", error)
        is_ready = prompt is row["raw_prompt"] and not self._restricted
        ids = (
            self.prompt_ids(row, shown_tools)
            if is_ready
            else self._rendered(prompt, shown_tools or None)
        )
        talk.prompt_ids = truncate(ids, self.prompt_length, self.config.data.truncation)
        return talk

    async def _converse(
        self,
        talk: AgentData,
        session: ToolSession,
        user: InteractionSession | None,
        deadline: float,
        sampling_params: Settings,
    ) -> None:
        while True:
            text, ids = await self._model_turn(talk, sampling_params)
            if not ids or self._at_a_limit(talk):
                return
            if time.monotonic() > deadline:
                session.facts.timeouts.append("trajectory")
                return
            calls = await self._calls(text, ids)
            if calls:
                talk.spans[-1]["calls"] = len(calls)
                started = time.perf_counter()
                answers = await session.answer(calls)
                talk.seconds["tools"] += time.perf_counter() - started
                new = [_tool_turn(*pair) for pair in zip(calls, answers, strict=True)]
            elif user is not None:
                scored = len(user.turn_scores)
                reply = await user.reply(talk.messages, deadline - time.monotonic())
                if len(user.turn_scores) > scored:
                    talk.spans[-1]["score"] = user.turn_scores[-1]
                    talk.add_reward(user.name, user.turn_scores[-1])
                if reply is None:
                    return
                new = [{"role": "user", "content": reply}]
            else:
                return
            try:
                if not self._observe(talk, new, text):
                    return
            except (PromptError, BrokenTemplate) as error:  # the answer is third-party text
                logger.warning("the answer cannot be rendered: %s", described(error))
                session.facts.failures += 1
                return

    async def _calls(self, text: str, ids: Sequence[int]) -> list[ToolCall]:
        """Returns the calls in the model's text; a parser error becomes one failed call."""
        if not self.tools:
            return []
        try:
            schemas = [tool.tool_schema for tool in self.tools.values()]
            return list(await self.parser.read(text, ids, schemas))
        except Exception as error:  # a parser may be user code, and the text is untrusted
            logger.warning("the tool-call parser failed: %s", described(error))
            return [ToolCall("", {}, f"the calls cannot be read: {described(error)}")]

    async def _model_turn(self, talk: AgentData, sampling: Settings) -> tuple[str, list[int]]:
        """Generates one model turn; returns its text for the parser and its token ids."""
        room = self._room(talk)
        max_tokens = sampling.get("max_tokens")
        started = time.perf_counter()
        output = await self.server_manager.generate(
            talk.request_id,
            prompt_ids=list(talk.prompt_ids),
            sampling_params={
                **sampling,
                "max_tokens": room if max_tokens is None else min(max_tokens, room),
                "stop": (*(sampling.get("stop") or ()), *self.parser.stop),
                "stop_token_ids": (
                    *(sampling.get("stop_token_ids") or ()),
                    *self.parser.stop_token_ids,
                ),
            },
        )
        talk.seconds["model"] += time.perf_counter() - started
        talk.add_turn(output)
        words = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        talk.messages.append({"role": "assistant", "content": words})
        if self.parser.in_template:
            return self.tokenizer.decode(output.token_ids), output.token_ids
        return words, output.token_ids

    def _room(self, talk: AgentData) -> int:
        """Returns how many tokens the response may still get."""
        used = len(talk.response_mask)
        return self.response_limit(len(talk.prompt_ids) - used) - used

    def _at_a_limit(self, talk: AgentData) -> bool:
        most, most_others = self.limits.max_assistant_turns, self.limits.max_user_turns
        return (
            self._room(talk) <= 0
            or (most is not None and talk.assistant_turns >= most)
            or (most_others is not None and talk.user_turns >= most_others)
        )

    def _observe(self, talk: AgentData, new: list[Message], text: str) -> bool:
        """Appends a tool or user turn; returns false when no tokens are left for an answer."""
        role, last = str(new[0]["role"]), talk.prompt_ids[-1]
        messages = new
        if role == "tool" and not self.parser.in_template:
            observation = self.parser.observation(text, [message["content"] for message in new])
            if self.tokenizer.decode([last], skip_special_tokens=True):  # the turn has no end token
                return self._append(
                    talk, new, self.tokenizer.encode(observation, add_special_tokens=False)
                )
            messages = [{"role": "user", "content": observation.strip()}]
        ids = observation_ids(
            messages,
            self.tokenizer,
            last_token=last,
            template_kwargs=self.config.data.apply_chat_template_kwargs,
            chat=self.config.data.prompt_format == "chat",
        )
        return self._append(talk, new, ids)

    def _append(self, talk: AgentData, new: list[Message], ids: Sequence[int]) -> bool:
        if len(ids) >= self._room(talk):
            return False
        talk.add_observation(ids, str(new[0]["role"]))
        talk.messages += new
        return True

    def _call_limits(self) -> CallLimits:
        limits = self.limits
        side = limits.tool_response_truncate_side
        chars, tokens = limits.max_tool_response_length, limits.max_observation_tokens

        def cut(text: str) -> str:
            return cut_tokens(cut_text(text, chars, side), self.tokenizer, tokens, side)

        return CallLimits(
            limits.max_parallel_calls, limits.max_tool_calls, limits.tool_timeout_s, cut
        )

    def _user_of(self, row: Settings) -> InteractionSession | None:
        """Returns the interaction that the row names, or the only one if it names none."""
        kwargs = row.get("interaction_kwargs") or {}
        if not self.interactions or not kwargs:
            return None
        name = kwargs.get("name") or next(iter(self.interactions))
        if not isinstance(name, str) or name not in self.interactions:
            raise ValueError(
                f"the row's interaction_kwargs.name={shown(name)} is not in "
                f"{self.limits.interaction_config_path}; it has {', '.join(self.interactions)}"
            )
        return InteractionSession(self.interactions[name], kwargs, self.limits.tool_timeout_s)

    def _output(
        self,
        talk: AgentData,
        session: ToolSession,
        user: InteractionSession | None,
        scores: Mapping[str, float],
    ) -> AgentLoopOutput:
        facts = session.facts
        start = len(talk.prompt_ids) - len(talk.response_mask)
        return AgentLoopOutput(
            prompt_ids=talk.prompt_ids[:start],
            response_ids=talk.prompt_ids[start:],
            response_mask=talk.response_mask,
            response_logprobs=talk.response_logprobs,
            versions=talk.versions,
            num_turns=talk.assistant_turns + talk.user_turns + 1,
            metrics=AgentLoopMetrics(
                talk.seconds["model"],
                talk.seconds["tools"],
                later_prompt_tokens=talk.later_tokens["prompt"],
                later_cached_tokens=talk.later_tokens["cached"],
            ),
            stop_reason=talk.stop_reason,
            routed_experts=talk.routed_experts,
            extra_fields={
                **talk.extra_fields,
                "tool_outputs": facts.outputs,
                "tool_rewards": talk.tool_rewards,
                "turn_scores": talk.turn_scores,
                "turn_rewards": talk.turn_rewards,
                "timeouts": [*facts.timeouts, *(user.timeouts if user else [])],
                "tool_call_counts": len(facts.outputs),
                "tool_failures": facts.failures + (user.failures if user else 0),
                "reward_scores": dict(scores),
                "turn_spans": talk.spans,
            },
        )


class ReactAgentLoop(ToolAgentLoop):
    """Named `react_agent`; the prompt explains the format of Thought, Action and Observation."""

    default_format = "react"


def _with_instructions(prompt: str | list[Message], text: str) -> str | list[Message]:
    """Adds the instructions after the system message, or before the first message without one."""
    if isinstance(prompt, str):
        return f"{text}\n\n{prompt}"
    messages = [dict(message) for message in as_messages(prompt)]
    first = messages[0]
    if not isinstance(first["content"], str):
        return [{"role": "system", "content": text}, *messages]
    parts = (first["content"], text) if first["role"] == "system" else (text, first["content"])
    first["content"] = "\n\n".join(parts)
    return messages


def _tool_turn(call: ToolCall, answer: str) -> Message:
    named = {} if call.tool_call_id is None else {"tool_call_id": call.tool_call_id}
    return {"role": "tool", "content": answer, **named}


@functools.cache
def _tools(tool_config_path: str | None, function_tool_path: str | None) -> dict[str, Tool]:
    """Loads the tools once per process, since a tool may hold a connection pool."""
    return {tool.name: tool for tool in load_all_tools(tool_config_path, function_tool_path)}


@functools.cache
def _interactions(path: str | None) -> dict[str, BaseInteraction]:
    return initialize_interactions_from_config(path) if path else {}
