"""Runs the interaction of one trajectory within time limits.

An interaction that raises or hangs never stops a run: the failure is counted, and the model gets no
further reply. An interaction that blocks the event loop cannot be interrupted.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar
from uuid import uuid4

from hone.agents.interactions.contract import BaseInteraction, Messages
from hone.agents.interactions.environment import EnvironmentInteraction
from hone.event_loop import DeadlineExceeded, run_with_deadline
from hone.text import clean_text, error_text
from hone.types import Settings

T = TypeVar("T")
logger = logging.getLogger(__name__)


class InteractionSession:
    """Calls one trajectory's interaction; after a failure, only its `finalize_interaction`."""

    def __init__(
        self,
        interaction: BaseInteraction,
        kwargs: Settings,
        timeout_s: float,
        *,
        instance_id: str | None = None,
    ) -> None:
        """With `instance_id`, the interaction has already been started."""
        self._interaction = interaction
        self._interaction_kwargs = dict(kwargs)
        self._timeout_s = timeout_s
        self._instance_id = instance_id
        self.turn_scores: list[float] = []
        self.timeouts: list[str] = []
        self.failures = 0

    @property
    def name(self) -> str:
        return self._interaction.name

    @property
    def is_environment(self) -> bool:
        """Whether the interaction is an environment, whose `step` also rewards the last turn at a limit."""
        return isinstance(self._interaction, EnvironmentInteraction)

    async def start(self, remaining_s: float) -> str | None:
        """Starts the interaction; returns the first observation or None."""

        async def start_interaction() -> tuple[str, str | None]:
            kwargs = self._interaction_kwargs
            result: Any = await self._interaction.start_interaction(uuid4().hex, **kwargs)
            instance_id, observation = result if isinstance(result, tuple) else (result, None)
            if isinstance(result, tuple) and not isinstance(observation, str):
                raise TypeError(f"the first observation is {observation!r}; return text")
            return instance_id, None if observation is None else clean_text(observation)

        result = await self._call("start_interaction", start_interaction(), remaining_s)
        self._instance_id, observation = result or (None, None)
        return observation

    async def reply(self, messages: Messages, remaining_s: float) -> str | None:
        """Returns the reply to the model's last turn; None ends the conversation."""
        if self._instance_id is None or self.failures:
            return None
        instance_id = self._instance_id

        async def generate_response() -> tuple[str | None, float | None]:
            is_done, text, score, _ = await self._interaction.generate_response(
                instance_id, [dict(message) for message in messages], **self._interaction_kwargs
            )
            if not is_done and not isinstance(text, str):
                raise TypeError(
                    f"generate_response returned the reply {text!r}; return text, or end the "
                    "conversation"
                )
            return None if is_done else clean_text(text), _check_finite(score)

        result = await self._call("generate_response", generate_response(), remaining_s)
        reply, score = result or (None, None)
        if score is not None:
            self.turn_scores.append(score)
        return reply

    async def score(self) -> float | None:
        """Returns the interaction's score of the conversation, or None after a failure."""
        if self._instance_id is None or self.failures:
            return None
        instance_id = self._instance_id

        async def calculate_score() -> float | None:
            return _check_finite(
                await _call_with_id(self._interaction.calculate_score, instance_id)
            )

        return await self._call("calculate_score", calculate_score())

    async def release(self) -> None:
        """Releases the state of the conversation; also called after a failure."""
        if self._instance_id is not None:
            instance_id, self._instance_id = self._instance_id, None
            finalize = self._interaction.finalize_interaction
            await self._call("finalize_interaction", _call_with_id(finalize, instance_id))

    async def _call(
        self, method: str, coroutine: Coroutine[None, None, T], remaining_s: float = float("inf")
    ) -> T | None:
        """Returns the result of an interaction's method, or counts its failure and returns None."""
        timeout_s = max(min(self._timeout_s, remaining_s), 0.0)
        try:
            return await run_with_deadline(coroutine, timeout_s)
        except DeadlineExceeded:
            self.timeouts.append(self.name)
            logger.warning("interaction %s: %s took longer than %g s", self.name, method, timeout_s)
            self.failures += 1
        except Exception as error:  # user code: any exception ends the conversation
            self.record_failure(method, error)
        return None

    def record_failure(self, method: str, error: Exception) -> None:
        """Logs and counts a failure; the model then gets no further reply."""
        logger.warning("interaction %s: %s failed: %s", self.name, method, error_text(error))
        self.failures += 1


def _check_finite(score: float | None) -> float | None:
    """Returns the score as a float; raises ValueError if the score is infinite or NaN."""
    if score is not None and not math.isfinite(score):
        raise ValueError(f"the score is {score}")
    return None if score is None else float(score)


async def _call_with_id(function: Callable[..., Awaitable[T]], instance_id: str) -> T:
    """Calls a method with the instance id, unless the method has no parameter, as in verl's base class."""
    return await (function(instance_id) if inspect.signature(function).parameters else function())
