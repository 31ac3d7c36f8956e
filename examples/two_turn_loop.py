"""An agent loop of one's own, outside the package: answer, read a hint, answer again.

    hone train actor_rollout_ref.rollout.agent.default_agent_loop=examples/two_turn_loop.py:TwoTurnAgentLoop …

The hint's tokens carry mask 0: the model reads them, and nothing is learned from having "written" them.
"""

from __future__ import annotations

import time
from typing import Any

from hone.agents.contract import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

HINT = "\nu:Look again.\na:"


class TwoTurnAgentLoop(AgentLoopBase):
    """Half of the response is the first answer's; the second has what is left after the hint."""

    def __init__(self, *arguments: Any, hint: str = HINT, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.hint_ids: list[int] = self.tokenizer.encode(hint, add_special_tokens=False)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        started = time.perf_counter()
        prompt_ids = self.prompt_ids(row)
        limit = self.response_limit(len(prompt_ids))
        first = await self.server_manager.generate(
            prompt_ids=prompt_ids,
            sampling_params={**sampling_params, "max_tokens": max(limit // 2, 1)},
        )
        response = list(first.token_ids)
        mask = [1] * len(response)
        log_probs, versions = list(first.log_probs), list(first.versions)
        turns = 1
        room = limit - len(response) - len(self.hint_ids)
        if room > 0:
            response += self.hint_ids
            second = await self.server_manager.generate(
                prompt_ids=prompt_ids + response,
                sampling_params={**sampling_params, "max_tokens": room},
            )
            response += second.token_ids
            mask += [0] * len(self.hint_ids) + [1] * len(second.token_ids)
            log_probs += [0.0] * len(self.hint_ids) + list(second.log_probs)
            versions += [second.versions[0]] * len(self.hint_ids) + list(second.versions)
            turns = 2
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response,
            response_mask=mask,
            response_logprobs=log_probs,
            versions=versions,
            num_turns=2 * turns,
            metrics=AgentLoopMetrics(generate_sequences=time.perf_counter() - started),
        )
