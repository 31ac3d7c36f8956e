"""One prompt and one completion: the default loop."""

from __future__ import annotations

import time
from typing import Any

from hone.agents.contract import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from hone.types import Fields


class SingleTurnAgentLoop(AgentLoopBase):
    async def run(self, sampling_params: Fields, **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = self.prompt_ids(kwargs)
        started = time.perf_counter()
        output = await self.server_manager.generate(
            kwargs["trajectory_id"], prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            response_logprobs=output.log_probs,
            num_turns=2,  # the prompt and the completion
            metrics=AgentLoopMetrics(
                time.perf_counter() - started, num_preempted=output.num_preempted or 0
            ),
            versions=output.versions,
            stop_reason=output.stop_reason.value,
            routed_experts=output.routed_experts,
        )
