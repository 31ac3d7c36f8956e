"""Runs the tool calls of one trajectory within limits on their number and time.

A tool that raises, hangs or does not exist never stops a run: the model reads an error message, and
the failure is counted. A tool that blocks the event loop cannot be interrupted.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

from hone.agents.agent_data import AgentData
from hone.agents.parsers.contract import ToolCall
from hone.agents.tools.contract import (
    BaseTool,
    CallResult,
    ToolError,
    normalize_function_tool_return,
    normalize_tool_return,
    response_text,
)
from hone.agents.tools.function_tool import FunctionTool
from hone.agents.tools.loading import Tool
from hone.event_loop import DeadlineExceeded, run_with_deadline
from hone.text import clean_text, clean_values, error_text
from hone.types import Fields, Function, Settings

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CallLimits:
    """Limits on the number of calls and on the time of each call."""

    max_calls_per_turn: int
    max_calls: int | None
    timeout_s: float
    truncate: Callable[[str], str]
    """Truncates an answer to the length limit."""


@dataclass
class ToolRecord:
    """The calls, timeouts and failures of one trajectory."""

    outputs: list[dict[str, Any]] = field(default_factory=list)
    """One entry per call: `name`, `arguments`, `text`, `reward` and `metrics`."""
    timeouts: list[str] = field(default_factory=list)
    """The names of the tools that timed out."""
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

    def __init__(self, message: str, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class ToolSession:
    """Runs the calls of one trajectory; a tool's state is created at its first call."""

    def __init__(
        self,
        tools: Mapping[str, Tool],
        agent_data: AgentData,
        limits: CallLimits,
    ) -> None:
        self._tools = tools
        self.agent_data = agent_data
        self._limits = limits
        self._instances: dict[str, tuple[BaseTool, str]] = {}
        self._num_calls = 0
        self.record = ToolRecord()

    async def run_calls(self, calls: Sequence[ToolCall]) -> list[str]:
        """Runs the calls of one turn concurrently, and returns one answer text per call."""
        calls = [_clean_call(call) for call in calls]
        refusals = [self._refusal(index, call) for index, call in enumerate(calls)]
        error_answers = [
            self._error_answer(text) if text is not None else None for text in refusals
        ]
        for index, call in enumerate(calls):
            if error_answers[index] is None:
                error_answers[index] = await self._create_state(call.name)
        answers = await asyncio.gather(
            *(
                self._run_call(call, error_answer)
                for call, error_answer in zip(calls, error_answers, strict=True)
            )
        )
        # Calls are recorded in call order, because they end in any order.
        for call, answer in zip(calls, answers, strict=True):
            self._record_call(call, answer)
        return [answer.text for answer in answers]

    def _record_call(self, call: ToolCall, answer: _Answer) -> None:
        self.record.failures += answer.failed
        if answer.timed_out:
            self.record.timeouts.append(call.name)
        if answer.reward is not None:
            self.agent_data.tool_rewards.append(answer.reward)
            self.agent_data.add_reward(call.name, answer.reward)
        self.record.outputs.append(
            {
                "name": call.name,
                "arguments": dict(call.arguments),
                "text": answer.text,
                "reward": answer.reward,
                "metrics": clean_values(answer.metrics),
            }
        )

    def _refusal(self, index: int, call: ToolCall) -> str | None:
        """Returns why a call is refused, or None; counts the call unless a limit refuses it."""
        max_calls = self._limits.max_calls
        if index >= self._limits.max_calls_per_turn:
            return f"not run: at most {self._limits.max_calls_per_turn} tool calls per turn"
        if max_calls is not None and self._num_calls >= max_calls:
            return f"not run: all {max_calls} tool calls are used up; answer without tools"
        self._num_calls += 1
        if call.error:
            return call.error
        if call.name not in self._tools:
            return f"there is no tool {call.name[:100]!r}; the tools are {', '.join(self._tools)}"
        required_names = self._tools[call.name].tool_schema.function.parameters.required
        missing_names = [name for name in required_names if name not in call.arguments]
        return f"{call.name} needs {', '.join(missing_names)}" if missing_names else None

    async def _create_state(self, name: str) -> _Answer | None:
        """Creates a tool's state; returns an error answer on failure, else None."""
        tool = self._tools[name]
        if name in self._instances or isinstance(tool, FunctionTool):
            return None

        async def create() -> str:
            kwargs = dict(self._kwargs_of(name, "create_kwargs"))
            # verl passes the `create_kwargs` both as keyword arguments and as one dict.
            if _accepts(tool.create, "create_kwargs"):
                kwargs["create_kwargs"] = dict(kwargs)
            result = await tool.create(uuid4().hex, **kwargs)
            return result[0] if isinstance(result, tuple) else result

        try:
            self._instances[name] = tool, await self._with_deadline(name, create())
        except _ToolFailed as failure:
            return self._error_answer(str(failure), failure.timed_out)
        return None

    async def _run_call(self, call: ToolCall, error_answer: _Answer | None) -> _Answer:
        """Returns `error_answer` if there is one, else runs the call."""
        if error_answer is not None:
            return error_answer

        async def execute() -> tuple[str, float, Fields]:
            response, reward, metrics = await self._execute(call)
            if response.image or response.video:
                raise ToolError("images and video are not supported; return text only")
            return response_text(response), reward, metrics

        try:
            text, reward, metrics = await self._with_deadline(call.name, execute())
        except _ToolFailed as failure:
            return self._error_answer(str(failure), failure.timed_out)
        return _Answer(self._limits.truncate(text), reward, metrics)

    async def _execute(self, call: ToolCall) -> CallResult:
        tool, arguments = self._tools[call.name], dict(call.arguments)
        if isinstance(tool, FunctionTool):
            return normalize_function_tool_return(await tool.call(arguments))
        kwargs = dict(self._kwargs_of(call.name, "execute_kwargs"))
        if _accepts(tool.execute, "agent_data"):
            kwargs["agent_data"] = self.agent_data
        _, instance_id = self._instances[call.name]
        return normalize_tool_return(await tool.execute(instance_id, arguments, **kwargs))

    async def _with_deadline(self, name: str, work: Coroutine[None, None, T]) -> T:
        """Returns the result of a tool's method; raises _ToolFailed on an error or a timeout."""
        try:
            return await run_with_deadline(work, self._limits.timeout_s)
        except DeadlineExceeded:
            message = f"{name} took longer than {self._limits.timeout_s:g} s"
            logger.warning("tool %s", message)
            raise _ToolFailed(message, timed_out=True) from None
        except Exception as error:  # a tool is user code: any exception becomes an answer
            message = f"{name} failed: {error_text(error)}"
            logger.warning("tool %s", message)
            raise _ToolFailed(message) from error

    def _error_answer(self, text: str, timed_out: bool = False) -> _Answer:
        return _Answer(
            self._limits.truncate(clean_text(f"Error: {text}")), failed=True, timed_out=timed_out
        )

    def _kwargs_of(self, name: str, key: str) -> Settings:
        return (self.agent_data.tools_kwargs.get(name) or {}).get(key) or {}

    async def scores(self) -> dict[str, float]:
        """Returns the score of each used tool; a tool that fails scores 0 and counts as a failure."""
        scores: dict[str, float] = {}
        for name, (tool, instance_id) in self._instances.items():
            try:
                scores[name] = await self._with_deadline(name, self._score(tool, name, instance_id))
            except _ToolFailed as failure:
                scores[name] = 0.0
                self._count_failure(name, failure)
        return scores

    async def _score(self, tool: BaseTool, name: str, instance_id: str) -> float:
        kwargs = self._kwargs_of(name, "calc_reward_kwargs")
        score = float(await tool.calc_reward(instance_id, **kwargs))
        if not math.isfinite(score):
            raise ValueError(f"calc_reward returned {score}")
        return score

    async def release(self) -> None:
        """Releases the state of every tool; failures are counted."""
        while self._instances:
            name, (tool, instance_id) = self._instances.popitem()
            try:
                await self._with_deadline(name, self._release(tool, name, instance_id))
            except _ToolFailed as failure:
                self._count_failure(name, failure)

    async def _release(self, tool: BaseTool, name: str, instance_id: str) -> None:
        await tool.release(instance_id, **self._kwargs_of(name, "release_kwargs"))

    def _count_failure(self, name: str, failure: _ToolFailed) -> None:
        self.record.failures += 1
        if failure.timed_out:
            self.record.timeouts.append(name)


def _accepts(function: Function, name: str) -> bool:
    """Returns whether a function takes a keyword argument of this name."""
    parameters = inspect.signature(function).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    return name in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _clean_call(call: ToolCall) -> ToolCall:
    """Cleans a call, which is untrusted model output, so that it can be printed and stored."""
    error = call.error
    if not isinstance(call.name, str) or not isinstance(call.arguments, Mapping):
        error = error or "a call needs a name, and its arguments as a JSON object"
    name = call.name if isinstance(call.name, str) else ""
    arguments = call.arguments if isinstance(call.arguments, Mapping) else {}
    return ToolCall(clean_text(name), clean_values(arguments), error)
