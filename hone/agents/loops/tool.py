"""The tool loop: the model speaks, its calls are answered, it speaks again; or a simulated user answers.

What tools and users say is appended as tokens with mask 0. A trajectory ends with a turn that calls
nothing, with the user's word, or at a limit of `rollout.multi_turn`. Leaves out images in answers.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hone.agents.agent_data import AgentData, AgentState
from hone.agents.contract import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from hone.agents.interactions.contract import BaseInteraction
from hone.agents.interactions.listing import initialize_interactions_from_config
from hone.agents.interactions.session import InteractionSession
from hone.agents.observations import cut_text, cut_tokens, observation_ids
from hone.agents.parsers.contract import ToolCall, ToolParser
from hone.agents.tools.listing import Tool, load_all_tools
from hone.agents.tools.session import CallLimits, ToolSession
from hone.config.rollout import MultiTurnConfig
from hone.data.prompts import Message, truncate
from hone.text import described, shown
from hone.types import Row, Settings

__all__ = ["AgentData", "AgentState", "ToolAgentLoop"]
logger = logging.getLogger(__name__)


class ToolAgentLoop(AgentLoopBase):
    """Named `tool_agent` in rows; `rollout.multi_turn` has its limits."""

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
        self.tools = _tools(limits.tool_config_path, limits.function_tool_path)
        self.interactions = _interactions(limits.interaction_config_path)
        self.parser = ToolParser.get_tool_parser(limits.format, self.tokenizer)

    async def run(self, sampling_params: Row, **row: Any) -> AgentLoopOutput:
        schemas = [tool.tool_schema.model_dump() for tool in self.tools.values()]
        prompt = truncate(
            self.prompt_ids(row, schemas), self.prompt_length, self.config.data.truncation
        )
        talk = AgentData(
            _as_talk(row["raw_prompt"]), prompt, row["trajectory_id"], row.get("tools_kwargs") or {}
        )
        session = ToolSession(self.tools, talk, self._call_limits())
        user = self._user_of(row)
        talk.turn_scores = user.turn_scores if user else []
        deadline = _deadline(self.limits.trajectory_timeout_s)
        try:
            if user is not None:
                await user.start(deadline - time.monotonic())
            await self._converse(talk, session, user, deadline, sampling_params)
            scores = await session.scores()
            if user is not None and (score := await user.score()) is not None:
                scores[user.name] = score
        finally:
            await session.release()
            if user is not None:
                await user.finish()
        return self._output(talk, session, user, scores)

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
            if self._at_a_limit(talk):
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
                said = await user.reply(talk.messages, deadline - time.monotonic())
                if len(user.turn_scores) > scored:
                    talk.spans[-1]["score"] = user.turn_scores[-1]
                if said is None:
                    return
                new = [{"role": "user", "content": said}]
            else:
                return
            if not self._observe(talk, new):
                return

    async def _calls(self, text: str, ids: Sequence[int]) -> list[ToolCall]:
        """The calls in the model's text; a parser that fails on it makes one failed call of it."""
        if not self.tools:
            return []
        try:
            schemas = [tool.tool_schema for tool in self.tools.values()]
            return list(await self.parser.read(text, ids, schemas))
        except Exception as error:  # a parser may be the user's own, and the text is hostile
            logger.warning("the tool-call parser failed: %s", described(error))
            return [ToolCall("", {}, f"the calls cannot be read: {described(error)}")]

    async def _model_turn(self, talk: AgentData, sampling: Settings) -> tuple[str, list[int]]:
        """One turn of the model: its text, and its token ids."""
        room = self.response_length - len(talk.response_mask)
        asked = sampling.get("max_tokens")
        stops = [*(sampling.get("stop_token_ids") or ()), *self.parser.stop_token_ids]
        started = time.perf_counter()
        output = await self.server_manager.generate(
            talk.request_id,
            prompt_ids=list(talk.prompt_ids),
            sampling_params={
                **sampling,
                "max_tokens": room if asked is None else min(asked, room),
                "stop_token_ids": tuple(stops),
            },
        )
        talk.seconds["model"] += time.perf_counter() - started
        talk.add_turn(output)
        text = self.tokenizer.decode(output.token_ids, skip_special_tokens=False)
        words = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        talk.messages.append({"role": "assistant", "content": words})
        return text, output.token_ids

    def _at_a_limit(self, talk: AgentData) -> bool:
        most, most_others = self.limits.max_assistant_turns, self.limits.max_user_turns
        return (
            len(talk.response_mask) >= self.response_length
            or (most is not None and talk.assistant_turns >= most)
            or (most_others is not None and talk.user_turns >= most_others)
        )

    def _observe(self, talk: AgentData, new: list[Message]) -> bool:
        """Append what was said to the model; false when no room is left for it to answer."""
        ids = observation_ids(
            new,
            self.tokenizer,
            last_token=talk.prompt_ids[-1],
            template_kwargs=self.config.data.apply_chat_template_kwargs,
            chat=self.config.data.prompt_format == "chat",
        )
        if len(talk.response_mask) + len(ids) >= self.response_length:
            return False
        talk.add_observation(ids, new[0]["role"])
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
        """The interaction the row names; the only one where it names none."""
        wanted = row.get("interaction_kwargs") or {}
        if not self.interactions or not wanted:
            return None
        name = wanted.get("name") or next(iter(self.interactions))
        if not isinstance(name, str) or name not in self.interactions:
            raise ValueError(
                f"the row's interaction_kwargs.name={shown(name)} is not in "
                f"{self.limits.interaction_config_path}; it has {', '.join(self.interactions)}"
            )
        return InteractionSession(self.interactions[name], wanted, self.limits.tool_timeout_s)

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
            metrics=AgentLoopMetrics(talk.seconds["model"], talk.seconds["tools"]),
            stop_reason=talk.stop_reason,
            extra_fields={
                **talk.extra_fields,
                "tool_outputs": facts.outputs,
                "tool_rewards": talk.tool_rewards,
                "turn_scores": talk.turn_scores,
                "timeouts": [*facts.timeouts, *(user.timeouts if user else [])],
                "tool_call_counts": len(facts.outputs),
                "tool_failures": facts.failures + (user.failures if user else 0),
                "reward_scores": dict(scores),
                "turn_spans": talk.spans,
            },
        )


def _tool_turn(call: ToolCall, answer: str) -> Message:
    named = {} if call.tool_call_id is None else {"tool_call_id": call.tool_call_id}
    return {"role": "tool", "content": answer, **named}


def _as_talk(raw_prompt: str | list[Message]) -> list[Message]:
    if isinstance(raw_prompt, str):
        return [{"role": "user", "content": raw_prompt}]
    return [dict(message) for message in raw_prompt]


def _deadline(seconds: float | None) -> float:
    return float("inf") if seconds is None else time.monotonic() + seconds


@functools.cache
def _tools(tool_config_path: str | None, function_tool_path: str | None) -> dict[str, Tool]:
    """Loaded once per process: a tool may hold a connection pool."""
    return {tool.name: tool for tool in load_all_tools(tool_config_path, function_tool_path)}


@functools.cache
def _interactions(path: str | None) -> dict[str, BaseInteraction]:
    return initialize_interactions_from_config(path) if path else {}
