"""Runs the conversation of one trajectory with a simulated user, within time limits.

An interaction that raises or hangs never stops a run: the conversation ends with the model's last turn,
and the failure is counted. Blocking the event loop cannot be interrupted; interactions must use `await`.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar
from uuid import uuid4

from hone.agents.bounded import Overdue, bounded
from hone.agents.interactions.contract import BaseInteraction, Messages
from hone.text import clean_text, described
from hone.types import Settings

T = TypeVar("T")
logger = logging.getLogger(__name__)


class InteractionSession:
    """Calls one interaction for one conversation; after a failure it only calls the final release."""

    def __init__(self, user: BaseInteraction, words: Settings, timeout_s: float) -> None:
        self._user = user
        self._words = dict(words)
        self._timeout_s = timeout_s
        self._id: str | None = None
        self.turn_scores: list[float] = []
        self.timeouts: list[str] = []
        self.failures = 0

    @property
    def name(self) -> str:
        return self._user.name

    async def start(self, left_s: float) -> str | None:
        """Starts within the trajectory's remaining time; returns the first observation or None."""
        self._id, observation = (
            await self._ask("start_interaction", self._start(), left_s) or (None,) * 2
        )
        return observation

    async def _start(self) -> tuple[str, str | None]:
        started: Any = await self._user.start_interaction(uuid4().hex, **self._words)
        if not isinstance(started, tuple):
            return started, None
        talk_id, observation = started
        if not isinstance(observation, str):
            raise TypeError(f"the first observation is {observation!r}; give text")
        return talk_id, clean_text(observation)

    async def reply(self, messages: Messages, left_s: float) -> str | None:
        """Returns the user's reply to the model's last turn; None ends the conversation."""
        if self._id is None or self.failures:
            return None
        answer = await self._ask("generate_response", self._reply(self._id, messages), left_s)
        if answer is None:
            return None
        reply, score = answer
        if score is not None:
            self.turn_scores.append(score)
        return reply

    async def _reply(self, talk_id: str, messages: Messages) -> tuple[str | None, float | None]:
        copies = [dict(message) for message in messages]
        done, said, score, _ = await self._user.generate_response(talk_id, copies, **self._words)
        if not done and not isinstance(said, str):
            raise TypeError(f"the user says {said!r}; give text, or end the talk")
        return None if done else clean_text(said), _number(score)

    async def score(self) -> float | None:
        """Returns the interaction's score of the conversation, or None if there is none."""
        if self._id is None or self.failures:
            return None
        return await self._ask("calculate_score", self._score(self._id))

    async def _score(self, talk_id: str) -> float | None:
        return _number(await _of_talk(self._user.calculate_score, talk_id))

    async def finish(self) -> None:
        """Releases the conversation's state, also after failures."""
        if self._id is not None:
            talk_id, self._id = self._id, None
            await self._ask(
                "finalize_interaction", _of_talk(self._user.finalize_interaction, talk_id)
            )

    async def _ask(
        self, verb: str, work: Coroutine[None, None, T], left_s: float = float("inf")
    ) -> T | None:
        """Returns the result of an interaction's method; counts a failure or timeout and returns None."""
        seconds = max(min(self._timeout_s, left_s), 0.0)
        try:
            return await bounded(work, seconds)
        except Overdue:
            self.timeouts.append(self.name)
            logger.warning("interaction %s: %s took longer than %g s", self.name, verb, seconds)
            self.failures += 1
        except Exception as error:  # user code: any exception ends the conversation
            self.fail(verb, error)
        return None

    def fail(self, verb: str, error: Exception) -> None:
        """Counts a failure, which ends the conversation with the model's next turn."""
        logger.warning("interaction %s: %s failed: %s", self.name, verb, described(error))
        self.failures += 1


def _number(score: float | None) -> float | None:
    if score is not None and not math.isfinite(score):
        raise ValueError(f"the score is {score}")
    return None if score is None else float(score)


async def _of_talk(function: Callable[..., Awaitable[T]], talk_id: str) -> T:
    """Calls a method with the conversation's id, which verl's base class omits."""
    return await (function(talk_id) if inspect.signature(function).parameters else function())
