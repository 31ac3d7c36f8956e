"""The state of one trajectory of the tool loop, under verl's names; tools get it as `agent_data`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hone.agents.contract import AgentLoopMetrics, AgentLoopOutput
from hone.data.messages import Message
from hone.rollout.contract import TokenOutput
from hone.types import Fields, Settings


@dataclass
class AgentData:
    """The messages, tokens and rewards of a trajectory so far."""

    messages: list[Message]
    """The conversation as text, for tools and interactions; the model reads only token ids."""
    prompt_ids: list[int]  # the prompt and all later tokens
    request_id: str
    tools_kwargs: Settings
    response_ids: list[int] = field(default_factory=list)  # the model's last turn
    response_mask: list[int] = field(default_factory=list)
    response_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """The version of the weights per response token."""
    turn_spans: list[dict[str, Any]] = field(default_factory=list)
    """Role, token count and mask of each turn and observation; turns may have `calls`, `score`, `reward`."""
    assistant_turns: int = 0
    user_turns: int = 0  # observations: the answers of tools and the replies of the simulated user
    turn_scores: list[float] = field(default_factory=list)
    """Scores of the interaction's replies."""
    tool_rewards: list[float] = field(default_factory=list)
    """Rewards of the tools' answers."""
    turn_rewards: list[dict[str, Any]] = field(default_factory=list)
    """Rewards of tools and interactions; `token` is the response index of the turn's last token."""
    extra_fields: Fields = field(default_factory=dict)
    """Values that tools set here become columns of the batch."""
    seconds: dict[str, float] = field(default_factory=lambda: {"model": 0.0, "tools": 0.0})
    """Time spent in model turns and in tool calls."""
    num_preempted: int = 0
    stop_reason: str | None = None
    routed_experts: Tensor | None = None
    """[tokens, layers, k]: the experts of the tokens up to the last turn with recorded experts."""
    later_turn_tokens: dict[str, int] = field(default_factory=lambda: {"prompt": 0, "cached": 0})
    """Prompt tokens of the turns after the first, and how many of them were prefix-cache hits."""

    def add_turn(self, output: TokenOutput) -> None:
        """Appends the tokens of a model turn."""
        if self.assistant_turns and output.cached_tokens is not None:
            self.later_turn_tokens["prompt"] += len(self.prompt_ids)
            self.later_turn_tokens["cached"] += output.cached_tokens
        self.response_ids = list(output.token_ids)
        self._append(output.token_ids, 1, output.log_probs, output.versions, "assistant")
        self.assistant_turns += 1
        self.num_preempted += output.num_preempted or 0
        self.stop_reason = output.stop_reason.value
        if output.routed_experts is not None:
            self.routed_experts = output.routed_experts

    def add_observation(self, ids: Sequence[int], role: str) -> None:
        """Appends the tokens of an observation."""
        count = len(ids)
        self._append(ids, 0, [0.0] * count, self.versions[-1:] * count, role)
        self.user_turns += 1

    def add_reward(self, name: str, reward: float) -> None:
        """Adds a reward to the last model turn."""
        token = len(self.response_mask) - 1
        self.turn_rewards.append({"name": name, "reward": reward, "token": token})
        for turn in self.turn_spans[-1:]:
            turn["reward"] = turn.get("reward", 0.0) + reward

    def to_output(self, extra_fields: Fields) -> AgentLoopOutput:
        """Returns the trajectory as the output of an agent loop."""
        response_start = len(self.prompt_ids) - len(self.response_mask)
        return AgentLoopOutput(
            prompt_ids=self.prompt_ids[:response_start],
            response_ids=self.prompt_ids[response_start:],
            response_mask=self.response_mask,
            response_logprobs=self.response_logprobs,
            versions=self.versions,
            num_turns=self.assistant_turns + self.user_turns + 1,
            metrics=AgentLoopMetrics(
                self.seconds["model"],
                self.seconds["tools"],
                num_preempted=self.num_preempted,
                later_prompt_tokens=self.later_turn_tokens["prompt"],
                later_cached_tokens=self.later_turn_tokens["cached"],
            ),
            stop_reason=self.stop_reason,
            routed_experts=self.routed_experts,
            extra_fields=extra_fields,
        )

    def _append(
        self,
        ids: Sequence[int],
        mask: int,
        log_probs: Sequence[float],
        versions: Sequence[int],
        role: str,
    ) -> None:
        self.prompt_ids += ids
        self.response_mask += [mask] * len(ids)
        self.response_logprobs += log_probs
        self.versions += versions
        self.turn_spans.append({"role": role, "tokens": len(ids), "mask": mask})
