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
    ToolError,
    normalize_function_tool_return,
    normalize_tool_return,
    response_text,
)
from hone.agents.tools.function_tool import FunctionTool
from hone.agents.tools.loading import Tool
from hone.event_loop import DeadlineExceeded, run_with_deadline
from hone.text import clean_text, clean_values, error_text
from hone.types import Function, Settings

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CallAnswer:
    """The answer to a call: the tool's answer, or an error message."""

    text: str
    reward: float | None = None
    metrics: Settings = field(default_factory=dict)
    is_error: bool = False
    has_timed_out: bool = False


@dataclass
class ToolSession:
    """Runs the calls of one trajectory; a tool's state is created at its first call."""

    tools: Mapping[str, Tool]
    agent_data: AgentData
    max_calls_per_turn: int
    max_calls: int | None
    timeout_s: float  # time limit of each call
    truncate: Callable[[str], str]  # truncates the text of an answer to the length limit
    outputs: list[dict[str, Any]] = field(default_factory=list)
    """One entry per call: `name`, `arguments`, `text`, `reward` and `metrics`."""
    timeouts: list[str] = field(default_factory=list)  # the names of the tools that timed out
    failures: int = 0

    def __post_init__(self) -> None:
        self._instances: dict[str, tuple[BaseTool, str]] = {}
        self._num_calls = 0

    async def run_calls(self, calls: Sequence[ToolCall]) -> list[str]:
        """Runs and records the calls of one turn, and returns one answer text per call."""
        answers = await self.answer_calls(calls)
        for call, answer in zip(calls, answers, strict=True):
            self.record(call, answer)
        return [answer.text for answer in answers]

    async def answer_calls(self, calls: Sequence[ToolCall]) -> list[CallAnswer]:
        """Runs the calls of one turn concurrently, and counts the failures."""
        calls = [_clean_call(call) for call in calls]
        errors = [self._refusal(index, call) for index, call in enumerate(calls)]
        for index, call in enumerate(calls):
            if errors[index] is None:
                errors[index] = await self._create_state(call.name)
        pairs = zip(calls, errors, strict=True)
        answers = await asyncio.gather(
            *(self._attempt(call.name, self._execute(call, error)) for call, error in pairs)
        )
        for call, answer in zip(calls, answers, strict=True):
            self._count_failure(call.name, answer)
        return answers

    def record(self, call: ToolCall, answer: CallAnswer) -> None:
        """Adds an answer to the outputs, and its reward to the trajectory."""
        call = _clean_call(call)
        if answer.reward is not None:
            self.agent_data.tool_rewards.append(answer.reward)
            self.agent_data.add_reward(call.name, answer.reward)
        self.outputs.append(
            {
                "name": call.name,
                "arguments": dict(call.arguments),
                "text": answer.text,
                "reward": answer.reward,
                "metrics": clean_values(answer.metrics),
            }
        )

    def _refusal(self, index: int, call: ToolCall) -> CallAnswer | None:
        """Returns an error answer if the call is refused, else None; counts calls within the limits."""
        if index >= self.max_calls_per_turn:
            return self._error(f"not run: at most {self.max_calls_per_turn} tool calls per turn")
        if self.max_calls is not None and self._num_calls >= self.max_calls:
            return self._error(
                f"not run: all {self.max_calls} tool calls are used up; answer without tools"
            )
        self._num_calls += 1
        if call.error:
            return self._error(call.error)
        if call.name not in self.tools:
            names = ", ".join(self.tools)
            return self._error(f"there is no tool {call.name[:100]!r}; the tools are {names}")
        required_names = self.tools[call.name].tool_schema.function.parameters.required
        missing_names = [name for name in required_names if name not in call.arguments]
        if missing_names:
            return self._error(f"{call.name} needs {', '.join(missing_names)}")
        return None

    async def _create_state(self, name: str) -> CallAnswer | None:
        """Creates a tool's state; returns an error answer on failure, else None."""
        tool = self.tools[name]
        if name in self._instances or isinstance(tool, FunctionTool):
            return None

        async def create() -> str:
            kwargs = dict(self._kwargs_of(name, "create_kwargs"))
            # verl passes the `create_kwargs` as one dict; older versions passed its entries.
            if _accepts(tool.create, "create_kwargs"):
                entries = {key: kwargs[key] for key in kwargs if _accepts(tool.create, key)}
                kwargs = {**entries, "create_kwargs": kwargs}
            result = await tool.create(uuid4().hex, **kwargs)
            return result[0] if isinstance(result, tuple) else result

        instance_id = await self._attempt(name, create())
        if isinstance(instance_id, CallAnswer):
            return instance_id
        self._instances[name] = tool, instance_id
        return None

    async def _execute(self, call: ToolCall, error: CallAnswer | None) -> CallAnswer:
        """Runs a call and returns the answer; returns `error` instead if the call has an error."""
        if error is not None:
            return error
        tool, arguments = self.tools[call.name], dict(call.arguments)
        if isinstance(tool, FunctionTool):
            result = normalize_function_tool_return(await tool.call(arguments))
        else:
            kwargs = dict(self._kwargs_of(call.name, "execute_kwargs"))
            if _accepts(tool.execute, "agent_data"):
                kwargs["agent_data"] = self.agent_data
            _, instance_id = self._instances[call.name]
            result = normalize_tool_return(await tool.execute(instance_id, arguments, **kwargs))
        response, reward, metrics = result
        if response.image or response.video:
            raise ToolError("images and video are not supported; return text only")
        return CallAnswer(self.truncate(response_text(response)), reward, metrics)

    async def _attempt(self, name: str, coroutine: Coroutine[None, None, T]) -> T | CallAnswer:
        """Returns the result of a tool's method, or an error answer after an error or a timeout."""
        has_timed_out = False
        try:
            return await run_with_deadline(coroutine, self.timeout_s)
        except DeadlineExceeded:
            message, has_timed_out = f"{name} took longer than {self.timeout_s:g} s", True
        except Exception as error:  # a tool is user code: any exception becomes an answer
            message = f"{name} failed: {error_text(error)}"
        logger.warning("tool %s", message)
        return self._error(message, has_timed_out)

    def _error(self, message: str, has_timed_out: bool = False) -> CallAnswer:
        text = self.truncate(clean_text(f"Error: {message}"))
        return CallAnswer(text, is_error=True, has_timed_out=has_timed_out)

    def _kwargs_of(self, name: str, key: str) -> Settings:
        kwargs = self.agent_data.tools_kwargs.get(name) or {}
        if isinstance(kwargs, str):
            raise ToolError(f"the row's tools_kwargs.{name} is a text; give an object with {key}")
        return kwargs.get(key) or {}

    async def scores(self) -> dict[str, float]:
        """Returns the score of each used tool; a tool that fails scores 0 and counts as a failure."""
        scores: dict[str, float] = {}
        for name, (tool, instance_id) in self._instances.items():
            score = await self._attempt(name, self._score(tool, name, instance_id))
            self._count_failure(name, score)
            scores[name] = 0.0 if isinstance(score, CallAnswer) else score
        return scores

    async def _score(self, tool: BaseTool, name: str, instance_id: str) -> float:
        kwargs = self._kwargs_of(name, "calc_reward_kwargs")
        score = float(await tool.calc_reward(instance_id, **kwargs))
        if not math.isfinite(score):
            raise ValueError(f"calc_reward returned {score}")
        return score

    async def release(self) -> None:
        """Releases the state of every tool; failures are counted."""

        async def release_tool(tool: BaseTool, name: str, instance_id: str) -> None:
            await tool.release(instance_id, **self._kwargs_of(name, "release_kwargs"))

        while self._instances:
            name, (tool, instance_id) = self._instances.popitem()
            result = await self._attempt(name, release_tool(tool, name, instance_id))
            self._count_failure(name, result)

    def _count_failure(self, name: str, result: CallAnswer | float | None) -> None:
        """Counts the result of a tool's method if the result is an error answer."""
        if isinstance(result, CallAnswer):
            self.failures += result.is_error
            if result.has_timed_out:
                self.timeouts.append(name)


def _accepts(function: Function, name: str) -> bool:
    """Returns whether a function takes a keyword argument of this name."""
    parameters = inspect.signature(function).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    return name in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _clean_call(call: ToolCall) -> ToolCall:
    """Returns a copy of a call, which is untrusted model output, with printable text and plain values."""
    error = call.error
    if not isinstance(call.name, str) or not isinstance(call.arguments, Mapping):
        error = error or "a call needs a name, and its arguments as a JSON object"
    name = call.name if isinstance(call.name, str) else ""
    arguments = call.arguments if isinstance(call.arguments, Mapping) else {}
    return ToolCall(clean_text(name), clean_values(arguments), error)
