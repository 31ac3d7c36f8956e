"""The state of a trajectory over its turns."""

from __future__ import annotations

import torch

from hone.agents.agent_data import AgentData
from hone.rollout.contract import StopReason, TokenOutput


def test_a_turn_without_experts_keeps_those_of_the_turns_before() -> None:
    talk = AgentData([], [1, 2], "a", {})
    experts = torch.zeros(3, 2, 1)
    talk.add_turn(TokenOutput([5, 6], [0.0, 0.0], [0, 0], routed_experts=experts))
    talk.add_turn(TokenOutput([], stop_reason=StopReason.LENGTH))
    assert talk.routed_experts is experts
    assert talk.stop_reason == "length"
