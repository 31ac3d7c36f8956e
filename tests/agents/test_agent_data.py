"""The state of a trajectory over its turns."""

from __future__ import annotations

import torch

from hone.agents.agent_data import AgentData
from hone.agents.contract import AgentLoopMetrics
from hone.rollout.contract import StopReason, TokenOutput


def test_a_turn_without_experts_keeps_those_of_the_turns_before() -> None:
    agent_data = AgentData([], [1, 2], "a", {})
    experts = torch.zeros(3, 2, 1)
    agent_data.add_turn(TokenOutput([5, 6], [0.0, 0.0], [0, 0], routed_experts=experts))
    agent_data.add_turn(TokenOutput([], stop_reason=StopReason.LENGTH))
    assert agent_data.routed_experts is experts
    assert agent_data.stop_reason == "length"


def test_the_output_counts_preemptions_and_prefix_cache_hits_of_later_turns() -> None:
    agent_data = AgentData([], [1, 2], "a", {})
    for cached_tokens in (0, 2):
        agent_data.add_turn(
            TokenOutput([5], [0.0], [0], cached_tokens=cached_tokens, num_preempted=1)
        )
    metrics = agent_data.to_output({}).metrics
    assert isinstance(metrics, AgentLoopMetrics)
    assert metrics.num_preempted == 2
    assert (metrics.later_prompt_tokens, metrics.later_cached_tokens) == (3, 2)
