"""The engine client of a trajectory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hone.agents.contract import ServerManager
from hone.rollout.contract import Sampling, StopReason, TokenOutput


class Counting:
    """Generates as many tokens as allowed."""

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, *_: Any, **__: Any
    ) -> TokenOutput:
        return TokenOutput([7] * sampling.max_tokens, stop_reason=StopReason.LENGTH)


@pytest.mark.parametrize(("prompt", "length"), [(2, 6), (5, 5), (9, 1), (10, 0), (12, 0)])
def test_a_response_ends_at_the_model_length(prompt: int, length: int) -> None:
    engine: Any = Counting()
    manager = ServerManager(engine, seed=0, max_tokens=6, max_model_len=10)
    out = asyncio.run(manager.generate("a", prompt_ids=[3] * prompt, sampling_params={}))
    assert len(out.token_ids) == length
    assert out.stop_reason is StopReason.LENGTH
