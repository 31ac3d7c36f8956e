"""A talk with a simulated user: bounded verbs, and failures that end the talk but not the run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hone.agents.interactions.contract import BaseInteraction
from hone.agents.interactions.session import InteractionSession

VERBS = ("start_interaction", "generate_response", "calculate_score", "finalize_interaction")


class User(BaseInteraction):
    """Answers "more" with score 0.5; fails in the one verb it is told to, in the way it is told to."""

    def __init__(self, verb: str = "", how: str = "") -> None:
        super().__init__({"name": "teacher"})
        self.verb, self.how = verb, how
        self.asked: list[str] = []

    async def _maybe_fail(self, verb: str) -> None:
        self.asked.append(verb)
        if verb == self.verb:
            if self.how == "hangs":
                await asyncio.Event().wait()
            raise SystemExit(3) if self.how == "exits" else ConnectionError("the simulator is down")

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


async def whole(talk: InteractionSession, left_s: float = 60.0) -> tuple[str | None, float | None]:
    await talk.start(60.0)
    said, score = await talk.reply([], left_s), await talk.score()
    await talk.finish()
    return said, score


def test_a_talk_that_goes_well() -> None:
    user = User()
    talk = InteractionSession(user, {}, 60.0)
    assert asyncio.run(whole(talk)) == ("more", 0.75)
    assert (talk.turn_scores, talk.failures, talk.timeouts) == ([0.5], 0, [])
    assert user.asked == list(VERBS)


@pytest.mark.parametrize("how", ["hangs", "raises", "exits"])
@pytest.mark.parametrize(
    ("verb", "outcome", "asked"),
    [
        ("start_interaction", (None, None), VERBS[:1]),
        ("generate_response", (None, None), (*VERBS[:2], VERBS[3])),
        ("calculate_score", ("more", None), VERBS),
        ("finalize_interaction", ("more", 0.75), VERBS),
    ],
)
def test_a_verb_that_fails_ends_the_talk_and_is_counted(
    how: str, verb: str, outcome: Any, asked: Any, caplog: pytest.LogCaptureFixture
) -> None:
    user = User(verb, how)
    talk = InteractionSession(user, {}, 0.05 if how == "hangs" else 60.0)
    assert asyncio.run(whole(talk)) == outcome
    assert user.asked == list(asked)
    assert talk.failures == 1
    assert talk.timeouts == (["teacher"] if how == "hangs" else [])
    assert f"interaction teacher: {verb}" in caplog.text


def test_an_answer_has_no_longer_than_the_trajectory_has_left() -> None:
    talk = InteractionSession(User("generate_response", "hangs"), {}, 3600.0)
    assert asyncio.run(whole(talk, left_s=0.05)) == (None, None)
    assert talk.timeouts == ["teacher"]


class Tells(BaseInteraction):
    """Answers what it is given."""

    def __init__(self, answer: Any, score: Any = 0.0) -> None:
        super().__init__({"name": "teacher"})
        self.answer, self.score = answer, score

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        return self.answer

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        score: float = self.score
        return score


def test_none_is_no_score() -> None:
    talk = InteractionSession(Tells((False, "a", None, {}), score=None), {}, 60.0)
    assert asyncio.run(whole(talk)) == ("a", None)
    assert (talk.turn_scores, talk.failures) == ([], 0)


def test_a_score_that_is_not_finite_is_a_failure() -> None:
    talk = InteractionSession(Tells((False, "a", 0.5, {}), score=float("nan")), {}, 60.0)
    assert asyncio.run(whole(talk)) == ("a", None)
    assert (talk.turn_scores, talk.failures) == ([0.5], 1)


@pytest.mark.parametrize(
    "answer", [None, (False, None, 0.0, {}), (False, "a"), (False, "a", float("inf"), {})]
)
def test_an_answer_of_the_wrong_shape_is_a_failure(answer: Any) -> None:
    talk = InteractionSession(Tells(answer), {}, 60.0)
    assert asyncio.run(whole(talk)) == (None, None)
    assert talk.failures == 1


def test_a_user_that_ends_the_talk_need_not_say_anything() -> None:
    talk = InteractionSession(Tells((True, None, 1.0, {}), score=1.0), {}, 60.0)
    assert asyncio.run(whole(talk)) == (None, 1.0)
    assert (talk.turn_scores, talk.failures) == ([1.0], 0)
