"""The tool loop: the model speaks, its calls are answered, it speaks again; or a simulated user answers.

What tools and users say is appended as tokens with mask 0. A trajectory ends with a turn that calls
nothing, with the user's word, or at a limit of `rollout.multi_turn`. Leaves out images in answers.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from hone.rollout.contract import TokenOutput
from hone.text import described, shown
from hone.types import Row, Settings

logger = logging.getLogger(__name__)


@dataclass
class Talk:
    """The trajectory so far."""

    prompt_ids: list[int]
    messages: list[Message]
    """The talk in words, for an interaction; the model never reads them."""
    response_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    spans: list[Message] = field(default_factory=list)
    """Role and number of tokens of each turn; a model's turn may have `calls` and a `score`."""
    model_turns: int = 0
    other_turns: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"model": 0.0, "tools": 0.0})
    stop_reason: str | None = None

    def add_turn(self, output: TokenOutput) -> None:
        self.response_ids += output.token_ids
        self.mask += [1] * len(output.token_ids)
        self.log_probs += output.log_probs
        self.versions += output.versions
        self.spans.append({"role": "assistant", "tokens": len(output.token_ids)})
        self.model_turns += 1
        self.stop_reason = output.stop_reason.value

    def add_observation(self, ids: Sequence[int], role: str) -> None:
        self.response_ids += ids
        self.mask += [0] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self.versions += [self.versions[-1]] * len(ids)
        self.spans.append({"role": role, "tokens": len(ids)})
        self.other_turns += 1


class ToolAgentLoop(AgentLoopBase):
    """Named `tool_agent` in rows; `rollout.multi_turn` has its limits."""

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
        talk = Talk(prompt, _as_talk(row["raw_prompt"]))
        session = ToolSession(self.tools, row.get("tools_kwargs") or {}, self._call_limits())
        user = self._user_of(row)
        deadline = _deadline(self.limits.trajectory_timeout_s)
        try:
            if user is not None:
                await user.start(deadline - time.monotonic())
            await self._converse(talk, session, user, deadline, sampling_params, row)
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
        talk: Talk,
        session: ToolSession,
        user: InteractionSession | None,
        deadline: float,
        sampling_params: Settings,
        row: Settings,
    ) -> None:
        while True:
            text, ids = await self._model_turn(talk, sampling_params, row["trajectory_id"])
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

    async def _model_turn(
        self, talk: Talk, sampling: Settings, request_id: str
    ) -> tuple[str, list[int]]:
        """One turn of the model: its text, and its token ids."""
        room = self.response_length - len(talk.response_ids)
        asked = sampling.get("max_tokens")
        stops = [*(sampling.get("stop_token_ids") or ()), *self.parser.stop_token_ids]
        started = time.perf_counter()
        output = await self.server_manager.generate(
            request_id,
            prompt_ids=[*talk.prompt_ids, *talk.response_ids],
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

    def _at_a_limit(self, talk: Talk) -> bool:
        most, most_others = self.limits.max_assistant_turns, self.limits.max_user_turns
        return (
            len(talk.response_ids) >= self.response_length
            or (most is not None and talk.model_turns >= most)
            or (most_others is not None and talk.other_turns >= most_others)
        )

    def _observe(self, talk: Talk, new: list[Message]) -> bool:
        """Append what was said to the model; false when no room is left for it to answer."""
        ids = observation_ids(
            new,
            self.tokenizer,
            last_token=talk.response_ids[-1],
            template_kwargs=self.config.data.apply_chat_template_kwargs,
            chat=self.config.data.prompt_format == "chat",
        )
        if len(talk.response_ids) + len(ids) >= self.response_length:
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
        talk: Talk,
        session: ToolSession,
        user: InteractionSession | None,
        scores: Mapping[str, float],
    ) -> AgentLoopOutput:
        facts = session.facts
        return AgentLoopOutput(
            prompt_ids=talk.prompt_ids,
            response_ids=talk.response_ids,
            response_mask=talk.mask,
            response_logprobs=talk.log_probs,
            versions=talk.versions,
            num_turns=talk.model_turns + talk.other_turns + 1,
            metrics=AgentLoopMetrics(talk.seconds["model"], talk.seconds["tools"]),
            stop_reason=talk.stop_reason,
            extra_fields={
                "tool_outputs": facts.outputs,
                "tool_rewards": facts.rewards,
                "turn_scores": user.turn_scores if user else [],
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
