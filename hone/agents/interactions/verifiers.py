"""Gives `reset` and `step` to environments (`MultiTurnEnv`) of the package verifiers before 0.4.

The environment runs its own rollout in a task; `step` passes it the model's turns. The last `step`
returns the reward of the rubric. `reset(index=3)` starts row 3 of the environment's dataset.
"""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import time
import unittest.mock
from collections.abc import Sequence
from typing import Any

from hone.agents.tools.contract import ToolError
from hone.data.messages import content_text
from hone.types import JsonValue, Row

_load_lock = threading.Lock()
_NEEDS_TOOL_CALLS = "{} needs the tool calls of a chat API (tool_defs), which is not supported"
_INSTALL = "pip install 'verifiers>=0.1.14,<0.4'"


class VerifiersEnvironment:
    """One rollout of the environment `verifiers.load_environment(environment, **options)`."""

    def __init__(self, environment: str, **options: JsonValue) -> None:
        self._environment = _load_environment(environment, json.dumps(options, sort_keys=True))
        self._events: asyncio.Queue[Sequence[Any] | dict[str, float] | Exception] = asyncio.Queue()
        self._answers: asyncio.Queue[str] = asyncio.Queue()
        self._rollout_task: asyncio.Task[None] | None = None

    async def reset(self, index: int = 0, **_: JsonValue) -> str:
        rows = self._environment.get_dataset()
        self._rollout_task = asyncio.create_task(self._run(dict(rows[index % len(rows)])))
        observation, _reward, is_done = await self._next_step()
        if is_done:
            raise ToolError("the environment ended before the model's first turn")
        return observation

    async def step(self, text: str) -> tuple[str, float, bool]:
        self._answers.put_nowait(text)
        return await self._next_step()

    async def close(self) -> None:
        if self._rollout_task is not None:
            self._rollout_task.cancel()
            await asyncio.gather(self._rollout_task, return_exceptions=True)

    async def _run(self, row: Row) -> None:
        environment = self._environment
        try:
            state = await environment.rollout(row, _client(self._answer), "policy", {})
            if state.get("error") is not None:
                raise RuntimeError(f"the rollout ended with {state['error']!r}")
            await environment.rubric.score_group([state])
            self._events.put_nowait({"reward": float(state["reward"])})
        except Exception as error:
            self._events.put_nowait(error)

    async def _answer(self, prompt: Sequence[Any], tools: Sequence[Any] | None) -> str:
        """Returns the model's answer to a prompt of the environment."""
        if tools:
            raise ToolError(_NEEDS_TOOL_CALLS.format("the environment"))
        self._events.put_nowait(prompt)
        return await self._answers.get()

    async def _next_step(self) -> tuple[str, float, bool]:
        """Waits for the rollout; returns (observation, reward, whether the rollout is done)."""
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        if isinstance(event, dict):
            return "", event["reward"], True
        messages = [m if isinstance(m, dict) else m.model_dump() for m in event]
        texts: list[str] = []
        for message in messages:
            if message["role"] == "assistant":
                texts.clear()  # the observation follows the model's last turn
            else:
                texts.append(content_text(message["content"]))
        return "\n\n".join(texts), 0.0, False


def _client(answer: Any) -> Any:
    """Returns a client object of verifiers that calls `answer(prompt, tools)` instead of an API."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage

    async def get_response(
        _: Any,
        prompt: Sequence[Any],
        model: str,
        sampling_args: Any,
        tools: Any = None,
        **kwargs: Any,
    ) -> Any:
        text = await answer(prompt, tools)
        message = ResponseMessage(
            role="assistant", content=text, finish_reason="stop", is_truncated=False
        )
        return Response(id="", created=int(time.time()), model=model, message=message)

    # Only the base class's `get_response` calls the other abstract methods, and it is overridden here, so
    # these methods can be None.
    unused_methods = dict.fromkeys(Client.__abstractmethods__)
    return type("LoopClient", (Client,), {**unused_methods, "get_response": get_response})(None)


@functools.cache
def _load_environment(name: str, options: str) -> Any:
    try:
        import verifiers
        import verifiers.clients
    except ModuleNotFoundError as error:
        raise ToolError(f"verifiers is not installed or too new ({error}): {_INSTALL}") from error
    if not hasattr(verifiers, "load_environment"):
        raise ToolError(f"the installed verifiers has no load_environment: {_INSTALL}")
    # Environments install signal handlers, which only the main thread may do, and which would
    # replace the run's handlers.
    with _load_lock, unittest.mock.patch("signal.signal"):
        environment = verifiers.load_environment(name, **json.loads(options))
    if getattr(environment, "tool_defs", None):
        raise ToolError(_NEEDS_TOOL_CALLS.format(f"the environment {name}"))
    return environment
