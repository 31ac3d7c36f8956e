"""A wrong answer gets another try; the right answer ends the conversation."""

from __future__ import annotations

import asyncio
from typing import Any

from hone.agents.interactions.gsm8k import CORRECT_REPLY, INCORRECT_REPLY, Gsm8kInteraction


def test_it_ends_at_the_first_right_answer() -> None:
    async def run() -> list[tuple[bool, str, float]]:
        interaction = Gsm8kInteraction({"name": "gsm8k"})
        instance_id = await interaction.start_interaction(
            ground_truth="9", query="4+5?", name="gsm8k"
        )
        messages: list[dict[str, Any]] = [{"role": "user", "content": "4+5?"}]
        results = []
        for turn in ("it is 9", "#### 8", "#### 9"):
            messages.append({"role": "assistant", "content": turn})
            results.append((await interaction.generate_response(instance_id, messages))[:3])
        assert await interaction.calculate_score(instance_id) == 1.0
        await interaction.finalize_interaction(instance_id)
        assert interaction._instance_dict == {}
        return results

    assert asyncio.run(run()) == [
        (False, INCORRECT_REPLY, 0.0),
        (False, INCORRECT_REPLY, 0.0),
        (True, CORRECT_REPLY, 1.0),
    ]


def test_a_message_without_text_is_a_wrong_answer_and_not_an_error() -> None:
    async def run() -> list[float]:
        interaction = Gsm8kInteraction({"name": "gsm8k"})
        instance_id = await interaction.start_interaction(ground_truth="9")
        scores = []
        for message in (
            {"role": "assistant", "tool_calls": []},
            {"role": "assistant", "content": None},
            {"role": "assistant", "content": 9},
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "#### 9"}, {"type": "image"}],
            },
        ):
            messages = [{"role": "assistant", "content": "#### 9"}, {"content": "lost"}, message]
            scores.append((await interaction.generate_response(instance_id, messages))[2])
        return scores

    assert asyncio.run(run()) == [0.0, 0.0, 0.0, 1.0]
