"""Runs the tool calls of one trajectory: every call gets an answer within the limits.

A tool that raises, hangs or does not exist never stops a run: the model reads an error message, and the
failure is counted. A tool that blocks the event loop cannot be interrupted; tools must use `await`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from uuid import uuid4

from hone.agents.agent_data import AgentData
from hone.agents.bounded import Overdue, bounded
from hone.agents.parsers.contract import ToolCall
from hone.agents.tools.answers import Answer, normalize_function_tool_return, text_of, tool_answer
from hone.agents.tools.contract import BaseTool
from hone.agents.tools.function_tool import FunctionTool
from hone.agents.tools.listing import Tool
from hone.text import clean_text, clean_values, described
from hone.types import Function, Row, Settings

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CallLimits:
    """Limits on the number of calls and on the time of each call."""

    a_turn: int
    a_trajectory: int | None
    timeout_s: float
    cut: Callable[[str], str]
    """Truncates an answer to the length limit."""


@dataclass
class ToolFacts:
    """The recorded calls and failures of one trajectory."""

    outputs: list[Row] = field(default_factory=list)
    timeouts: list[str] = field(default_factory=list)
    failures: int = 0


@dataclass(frozen=True)
class _Answer:
    text: str
    reward: float | None = None
    metrics: Settings = field(default_factory=dict)
    failed: bool = False
    timed_out: bool = False


class _ToolFailed(Exception):
    """A tool's method raised or timed out; the model reads the message."""

    def __init__(self, sentence: str, late: bool = False) -> None:
        super().__init__(sentence)
        self.late = late


class ToolSession:
    """Makes the calls of one trajectory; a tool's state is created at its first call."""

    def __init__(
        self,
        tools: Mapping[str, Tool],
        agent_data: AgentData,
        limits: CallLimits,
    ) -> None:
        self._tools = tools
        self.agent_data = agent_data
        self._limits = limits
        self._instances: dict[str, str] = {}
        self._made = 0
        self.facts = ToolFacts()

    async def answer(self, calls: Sequence[ToolCall]) -> list[str]:
        """Returns one text per call, in order; the calls of one turn run concurrently."""
        calls = [_cleaned(call) for call in calls]
        refusals = [self._allowed(place, call) for place, call in enumerate(calls)]
        refused = [self._error(text) if text is not None else None for text in refusals]
        for place, call in enumerate(calls):
            if refused[place] is None:
                refused[place] = await self._create(call.name)
        answers = await asyncio.gather(
            *(self._one(call, error) for call, error in zip(calls, refused, strict=True))
        )
        # Recorded in call order, not in finish order, so that a replay records the same.
        for call, answer in zip(calls, answers, strict=True):
            self._keep(call, answer)
        return [answer.text for answer in answers]

    def _keep(self, call: ToolCall, answer: _Answer) -> None:
        self.facts.failures += answer.failed
        if answer.timed_out:
            self.facts.timeouts.append(call.name)
        if answer.reward is not None:
            self.agent_data.tool_rewards.append(answer.reward)
            self.agent_data.add_reward(call.name, answer.reward)
        self.facts.outputs.append(
            {
                "name": call.name,
                "arguments": dict(call.arguments),
                "text": answer.text,
                "reward": answer.reward,
                "metrics": clean_values(answer.metrics),
            }
        )

    def _allowed(self, place: int, call: ToolCall) -> str | None:
        """Returns why a call is refused, or None."""
        most = self._limits.a_trajectory
        if place >= self._limits.a_turn:
            return f"not run: at most {self._limits.a_turn} tool calls a turn"
        if most is not None and self._made >= most:
            return f"not run: all {most} tool calls are used up; answer without tools"
        self._made += 1
        if call.error:
            return call.error
        if call.name not in self._tools:
            return f"there is no tool {call.name[:100]!r}; the tools are {', '.join(self._tools)}"
        required = self._tools[call.name].tool_schema.function.parameters.required
        missing = [name for name in required if name not in call.arguments]
        return f"{call.name} needs {', '.join(missing)}" if missing else None

    async def _create(self, name: str) -> _Answer | None:
        """Creates a tool's state; returns an error answer on failure, else None."""
        tool = self._tools[name]
        if name in self._instances or isinstance(tool, FunctionTool):
            return None

        async def work() -> str:
            given = dict(self._kwargs_of(name, "create_kwargs"))
            # verl passes these both as keyword arguments and as one dict.
            if _takes(tool.create, "create_kwargs"):
                given["create_kwargs"] = dict(given)
            created = await tool.create(uuid4().hex, **given)
            return created[0] if isinstance(created, tuple) else created

        try:
            self._instances[name] = await self._bounded(name, work())
        except _ToolFailed as failure:
            return self._error(str(failure), failure.late)
        return None

    async def _one(self, call: ToolCall, refused: _Answer | None) -> _Answer:
        if refused is not None:
            return refused

        async def work() -> tuple[str, float, Row]:
            response, reward, metrics = await self._called(call)
            return text_of(response), reward, metrics

        try:
            text, reward, more = await self._bounded(call.name, work())
        except _ToolFailed as failure:
            return self._error(str(failure), failure.late)
        return _Answer(self._limits.cut(text), reward, more)

    async def _called(self, call: ToolCall) -> Answer:
        tool, arguments = self._tools[call.name], dict(call.arguments)
        if isinstance(tool, FunctionTool):
            return normalize_function_tool_return(await tool.call(arguments))
        given = dict(self._kwargs_of(call.name, "execute_kwargs"))
        if _takes(tool.execute, "agent_data"):
            given["agent_data"] = self.agent_data
        return tool_answer(await tool.execute(self._instances[call.name], arguments, **given))

    async def _bounded(self, name: str, work: Coroutine[None, None, T]) -> T:
        """Returns the result of a tool's method; raises _ToolFailed on an error or a timeout."""
        try:
            return await bounded(work, self._limits.timeout_s)
        except Overdue:
            late = f"{name} took longer than {self._limits.timeout_s:g} s"
            logger.warning("tool %s", late)
            raise _ToolFailed(late, late=True) from None
        except Exception as error:  # a tool is user code: any exception becomes an answer
            sentence = f"{name} failed: {described(error)}"
            logger.warning("tool %s", sentence)
            raise _ToolFailed(sentence) from error

    def _error(self, text: str, late: bool = False) -> _Answer:
        return _Answer(self._limits.cut(clean_text(f"Error: {text}")), failed=True, timed_out=late)

    def _kwargs_of(self, name: str, kind: str) -> Settings:
        return (self.agent_data.tools_kwargs.get(name) or {}).get(kind) or {}

    async def scores(self) -> dict[str, float]:
        """Returns each tool's score; a score that is not finite becomes 0 and counts as a failure."""
        scores: dict[str, float] = {}
        for name, instance in self._instances.items():
            try:
                scores[name] = await self._bounded(name, self._score(name, instance))
            except _ToolFailed as failure:
                scores[name] = 0.0
                self._count(name, failure)
        return scores

    async def _score(self, name: str, instance: str) -> float:
        given = self._kwargs_of(name, "calc_reward_kwargs")
        score = float(await self._stateful(name).calc_reward(instance, **given))
        if not math.isfinite(score):
            raise ValueError(f"calc_reward gave {score}")
        return score

    async def release(self) -> None:
        """Releases the state of every tool, also after failures."""
        while self._instances:
            name, instance = self._instances.popitem()
            try:
                await self._bounded(name, self._release(name, instance))
            except _ToolFailed as failure:
                self._count(name, failure)

    async def _release(self, name: str, instance: str) -> None:
        given = self._kwargs_of(name, "release_kwargs")
        await self._stateful(name).release(instance, **given)

    def _stateful(self, name: str) -> BaseTool:
        tool = self._tools[name]
        if isinstance(tool, FunctionTool):
            raise TypeError(f"{name} is a function and has no state")
        return tool

    def _count(self, name: str, failure: _ToolFailed) -> None:
        self.facts.failures += 1
        if failure.late:
            self.facts.timeouts.append(name)


def _takes(function: Function, name: str) -> bool:
    parameters = inspect.signature(function).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    return name in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _cleaned(call: ToolCall) -> ToolCall:
    """Cleans a call, which is untrusted model output, so that it can be shown and stored."""
    error = call.error
    if not isinstance(call.name, str) or not isinstance(call.arguments, Mapping):
        error = error or "a call has a name and an object of arguments"
    name = call.name if isinstance(call.name, str) else ""
    arguments = call.arguments if isinstance(call.arguments, Mapping) else {}
    return ToolCall(clean_text(name), clean_values(arguments), error)
