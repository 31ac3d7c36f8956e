"""Cores that make the same changes."""

from __future__ import annotations

import pytest
import torch

from hone.agents.loop_thread import run_with_engine
from hone.rollout.contract import RolloutError, Sampling

from ..models import policy
from .slot import Slot

LONG = Sampling(60, 1.0, 0, ignore_eos=True)


def test_ranks_that_drew_different_tokens_stop() -> None:
    slot = Slot(policy())
    draw = slot.cores[1]._sample  # type: ignore[attr-defined]

    def wrong(logits: torch.Tensor) -> None:
        draw(logits.roll(1, -1))

    slot.cores[1]._sample = wrong  # type: ignore[attr-defined]
    slot.follow()
    with pytest.raises(RolloutError, match="sampled different tokens"):
        run_with_engine(slot.leader, slot.leader.generate([3, 4], LONG, "a"))
    slot.join()
