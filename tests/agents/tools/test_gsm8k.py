"""The tool scores 1 for a right answer; a call without improvement has a small penalty."""

from __future__ import annotations

import asyncio

from hone.agents.tools.gsm8k import Gsm8kTool


def test_the_first_right_answer_is_free_and_further_calls_cost() -> None:
    async def ask() -> list[tuple[str | None, float]]:
        tool = Gsm8kTool({})
        one, _ = await tool.create(ground_truth="42")
        other, _ = await tool.create(ground_truth="7")
        results = []
        for answer in ("41", "#### 42", "42"):
            response, reward, _ = await tool.execute(one, {"answer": answer})
            results.append((response.text, reward))
        assert await tool.calc_reward(one) == 1.0
        assert await tool.calc_reward(other) == 0.0
        await tool.release(one)
        await tool.release(other)
        assert tool._states == {}
        return results

    assert asyncio.run(ask()) == [
        ("Current parsed answer='41' score=0.0", -0.05),
        ("Current parsed answer='#### 42' score=1.0", 0.0),
        ("Current parsed answer='42' score=1.0", -0.05),
    ]
