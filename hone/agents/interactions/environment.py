"""Text environments as interactions: classes with `reset(**kwargs)` and `step(text)`.

`reset` returns an observation or (observation, info). `step` returns (observation, reward,
done[, info]), Gymnasium's five values, or an object with `observation`, `reward` and `done`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from hone.agents.interactions.contract import BaseInteraction, Messages
from hone.agents.tools.contract import ToolError, to_tool_response
from hone.event_loop import run_coroutine, run_in_thread
from hone.types import Fields, Function, JsonValue, Row, Settings

_TEXT_FIELDS = ("text", "message", "prompt", "content", "output", "echoed_message")


class EnvironmentInteraction(BaseInteraction):
    """Runs one environment per trajectory, created by `make_environment(**config)`."""

    def __init__(self, make_environment: Callable[..., Any], config: Settings) -> None:
        super().__init__(config)
        options = {key: value for key, value in config.items() if key != "name"}
        self._make_environment = functools.partial(make_environment, **options)
        self._environments: dict[str, Any] = {}
        self._total_rewards: dict[str, float] = {}

    async def start_interaction(  # type: ignore[override]
        self, instance_id: str | None = None, name: str | None = None, **kwargs: JsonValue
    ) -> tuple[str, str]:
        """Returns the id and the first observation; `kwargs` are the row's `interaction_kwargs`."""
        instance_id = instance_id or uuid4().hex
        environment = await _make_in_thread(self._make_environment)
        self._environments[instance_id], self._total_rewards[instance_id] = environment, 0.0
        try:
            result = await _call(environment.reset, **kwargs)
        except BaseException:
            await self.finalize_interaction(instance_id)
            raise
        if isinstance(result, tuple):
            return instance_id, _observation_text(result[0])
        return instance_id, _observation_text(getattr(result, "observation", result))

    async def check_creation(self) -> None:
        """Creates an environment and closes it, to raise its errors before training."""
        instance_id = uuid4().hex
        self._environments[instance_id] = await _make_in_thread(self._make_environment)
        await self.finalize_interaction(instance_id)

    async def generate_response(
        self, instance_id: str, messages: Messages, **kwargs: JsonValue
    ) -> tuple[bool, str, float, Fields]:
        step = self._environments[instance_id].step
        observation, reward, done = _parse_step(await _call(step, str(messages[-1]["content"])))
        self._total_rewards[instance_id] += reward
        return done, _observation_text(observation), reward, {}

    async def calculate_score(self, instance_id: str, **kwargs: JsonValue) -> float:
        return self._total_rewards[instance_id]

    async def finalize_interaction(self, instance_id: str, **kwargs: JsonValue) -> None:
        self._total_rewards.pop(instance_id, None)
        await _close(self._environments.pop(instance_id, None))


async def _make_in_thread(make_environment: Callable[[], Any]) -> Any:
    """Makes an environment in a thread; after a cancellation, the environment is closed once made."""
    environments: list[Any] = []
    was_cancelled = threading.Event()

    def make() -> None:
        environments.append(make_environment())
        if was_cancelled.is_set():
            close_late()

    def close_late() -> None:
        try:
            environment = environments.pop()
        except IndexError:  # not made yet, or closed by the other thread
            return
        run_coroutine(_close(environment))

    try:
        await run_in_thread(make)
    except asyncio.CancelledError:
        was_cancelled.set()
        threading.Thread(target=close_late, name="hone-close", daemon=True).start()
        raise
    return environments.pop()


async def _close(environment: Any) -> None:
    close = getattr(environment, "close", None)
    if callable(close):
        await _call(close)


async def _call(function: Function, *arguments: Any, **kwargs: Any) -> Any:
    """Calls an environment's method; a synchronous method runs in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **kwargs)
    result = await run_in_thread(functools.partial(function, *arguments, **kwargs))
    return await result if inspect.isawaitable(result) else result  # of a decorated async method


def _parse_step(step_result: Any) -> tuple[Any, float, bool]:
    """Returns (observation, reward, whether the episode is done) of a result of `step`."""
    if not isinstance(step_result, tuple):
        reward, done = step_result.reward, step_result.done
        return step_result.observation, float(reward or 0.0), bool(done)
    if len(step_result) not in (3, 4, 5):
        raise ToolError(
            f"step returned {len(step_result)} values; return observation, reward, done[, info]"
        )
    done_flags = step_result[2:4] if len(step_result) == 5 else step_result[2:3]
    return step_result[0], float(step_result[1] or 0.0), any(map(bool, done_flags))


def _observation_text(observation: Any) -> str:
    """Returns an observation as text; a dict or object gives the first string of its `_TEXT_FIELDS`."""
    is_mapping = isinstance(observation, Mapping)
    fields = observation if is_mapping else getattr(observation, "__dict__", {})
    for name in _TEXT_FIELDS:
        if isinstance(fields.get(name), str):
            return str(fields[name])
    return to_tool_response(observation).text or ""


class OpenEnvEnvironment:
    """A client of the OpenEnv server at `base_url`; `step` sends a model turn as `{field: text}`."""

    def __init__(self, base_url: str, field: str = "message", **options: JsonValue) -> None:
        try:
            from openenv.core.generic_client import GenericEnvClient
        except ModuleNotFoundError as error:
            raise ToolError("OpenEnv is not installed: pip install openenv-core") from error
        self._client, self._field = GenericEnvClient(base_url=base_url, **options), field

    async def reset(self, **kwargs: JsonValue) -> Any:
        return await self._client.reset(**kwargs)

    async def step(self, text: str) -> Any:
        return await self._client.step({self._field: text})

    async def close(self) -> None:
        await self._client.close()


class ReasoningGymEnvironment:
    """The reasoning-gym dataset `environment`: `reset` returns a question, `step` scores the answer."""

    def __init__(
        self, environment: str, size: int = 500, seed: int = 42, **options: JsonValue
    ) -> None:
        self._dataset = _load_dataset(environment, size, seed, json.dumps(options, sort_keys=True))
        self._entry: Row = {}

    def reset(self, index: int = 0, **_: JsonValue) -> str:
        self._entry = self._dataset[index % len(self._dataset)]
        return str(self._entry["question"])

    def step(self, text: str) -> tuple[str, float, bool]:
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(text, tag_name="answer") or text.strip()
        return "", float(self._dataset.score_answer(answer=answer, entry=self._entry)), True


@functools.cache
def _load_dataset(name: str, size: int, seed: int, options: str) -> Any:
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ToolError("reasoning-gym is not installed: pip install 'hone-rl[gym]'") from error
    return reasoning_gym.create_dataset(name, size=size, seed=seed, **json.loads(options))
