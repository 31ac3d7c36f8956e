"""An interaction session: methods have deadlines, and failures end only the conversation."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hone.agents.interactions.contract import BaseInteraction
from hone.agents.interactions.session import InteractionSession

VERBS = ("start_interaction", "generate_response", "calculate_score", "finalize_interaction")


class User(BaseInteraction):
    """Replies "more" with score 0.5; may fail in one method."""

    def __init__(self, verb: str = "", failure_kind: str = "") -> None:
        super().__init__({"name": "teacher"})
        self.verb, self.failure_kind = verb, failure_kind
        self.called: list[str] = []

    async def _maybe_fail(self, verb: str) -> None:
        self.called.append(verb)
        if verb == self.verb:
            if self.failure_kind == "hangs":
                await asyncio.Event().wait()
            raise (
                SystemExit(3)
                if self.failure_kind == "exits"
                else ConnectionError("the simulator is down")
            )

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        await self._maybe_fail("start_interaction")
        return str(instance_id)

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        await self._maybe_fail("generate_response")
        return False, "more", 0.5, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        await self._maybe_fail("calculate_score")
        return 0.75

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        await self._maybe_fail("finalize_interaction")


async def run_session(
    session: InteractionSession, left_s: float = 60.0
) -> tuple[str | None, float | None]:
    await session.start(60.0)
    reply, score = await session.reply([], left_s), await session.score()
    await session.release()
    return reply, score


def test_a_talk_that_goes_well() -> None:
    user = User()
    session = InteractionSession(user, {}, 60.0)
    assert asyncio.run(run_session(session)) == ("more", 0.75)
    assert (session.turn_scores, session.failures, session.timeouts) == ([0.5], 0, [])
    assert user.called == list(VERBS)


@pytest.mark.parametrize("failure_kind", ["hangs", "raises", "exits"])
@pytest.mark.parametrize(
    ("verb", "outcome", "called"),
    [
        ("start_interaction", (None, None), VERBS[:1]),
        ("generate_response", (None, None), (*VERBS[:2], VERBS[3])),
        ("calculate_score", ("more", None), VERBS),
        ("finalize_interaction", ("more", 0.75), VERBS),
    ],
)
def test_a_verb_that_fails_ends_the_talk_and_is_counted(
    failure_kind: str, verb: str, outcome: Any, called: Any, caplog: pytest.LogCaptureFixture
) -> None:
    user = User(verb, failure_kind)
    session = InteractionSession(user, {}, 0.05 if failure_kind == "hangs" else 60.0)
    assert asyncio.run(run_session(session)) == outcome
    assert user.called == list(called)
    assert session.failures == 1
    assert session.timeouts == (["teacher"] if failure_kind == "hangs" else [])
    assert f"interaction teacher: {verb}" in caplog.text


def test_an_answer_has_no_longer_than_the_trajectory_has_left() -> None:
    session = InteractionSession(User("generate_response", "hangs"), {}, 3600.0)
    assert asyncio.run(run_session(session, left_s=0.05)) == (None, None)
    assert session.timeouts == ["teacher"]


class Tells(BaseInteraction):
    """Returns the given reply and score."""

    def __init__(self, answer: Any, score: Any = 0.0) -> None:
        super().__init__({"name": "teacher"})
        self.answer, self.score = answer, score

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        return self.answer

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        score: float = self.score
        return score


def test_none_is_no_score() -> None:
    session = InteractionSession(Tells((False, "a", None, {}), score=None), {}, 60.0)
    assert asyncio.run(run_session(session)) == ("a", None)
    assert (session.turn_scores, session.failures) == ([], 0)


def test_a_score_that_is_not_finite_is_a_failure() -> None:
    session = InteractionSession(Tells((False, "a", 0.5, {}), score=float("nan")), {}, 60.0)
    assert asyncio.run(run_session(session)) == ("a", None)
    assert (session.turn_scores, session.failures) == ([0.5], 1)


@pytest.mark.parametrize(
    "answer", [None, (False, None, 0.0, {}), (False, "a"), (False, "a", float("inf"), {})]
)
def test_an_answer_of_the_wrong_shape_is_a_failure(answer: Any) -> None:
    session = InteractionSession(Tells(answer), {}, 60.0)
    assert asyncio.run(run_session(session)) == (None, None)
    assert session.failures == 1


def test_a_user_that_ends_the_talk_need_not_say_anything() -> None:
    session = InteractionSession(Tells((True, None, 1.0, {}), score=1.0), {}, 60.0)
    assert asyncio.run(run_session(session)) == (None, 1.0)
    assert (session.turn_scores, session.failures) == ([1.0], 0)
