"""The weather interaction scores 1 if a tool was called."""

from __future__ import annotations

import asyncio

import pytest

from hone.agents.interactions.weather import WeatherInteraction


@pytest.mark.parametrize(("role", "score"), [("tool", 1.0), ("user", 0.0)])
def test_it_ends_after_one_turn_and_scores_a_tools_answer(role: str, score: float) -> None:
    async def run() -> None:
        user = WeatherInteraction({"name": "weather"})
        instance_id = await user.start_interaction(query="Paris?")
        messages = [{"role": role, "content": "x"}, {"role": "assistant", "content": "y"}]
        ended, reply, reward, _ = await user.generate_response(instance_id, messages)
        assert (ended, reward, await user.calculate_score(instance_id)) == (True, score, score)
        assert ("Thank you" in reply) == (score == 1.0)
        await user.finalize_interaction(instance_id)

    asyncio.run(run())
