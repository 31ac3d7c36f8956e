"""The slow reference engine: every token is a full forward of one sequence, without cache or batching.

Tests compare the native engine with this one; the two share only the policy and the sampling function.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hone.models.attention import forward_options
from hone.models.policy import PolicyModel
from hone.ops.attention import SegmentLayout
from hone.rollout.contract import Traits
from hone.rollout.event_loop_engine import EventLoopEngine
from hone.rollout.native.sampler import SamplingRows, sample_tokens
from hone.rollout.requests import Request, RequestRules
from hone.rollout.weights import load_weights
from hone.tokenizer import Tokenizer


class HFRollout(EventLoopEngine):
    """A `RolloutEngine` that decodes in the event loop, one token at a time."""

    name = "hf"
    traits = Traits(uses_training_module=True, loads_adapters=True)

    def __init__(
        self, policy: PolicyModel, *, eos_ids: Sequence[int], tokenizer: Tokenizer | None
    ) -> None:
        super().__init__(RequestRules.of(policy.lm.config, eos_ids, tokenizer))
        self._policy = policy

    @torch.inference_mode()
    def _sample_token(self, request: Request) -> None:
        device = next(self._policy.parameters()).device
        ids = torch.tensor([*request.prompt_ids, *request.token_ids], device=device)
        layout = SegmentLayout([len(ids)], []).to(device)
        hidden = self._policy.decoder(
            input_ids=ids[None],
            position_ids=torch.arange(len(ids), device=device)[None],
            use_cache=False,
            **forward_options(self._policy.decoder, layout),
        ).last_hidden_state[0]
        logits = self._policy.logits(hidden[-1:])
        position = torch.tensor([len(ids)], device=device)
        token, log_prob = sample_tokens(
            logits, position, SamplingRows.of([request.sampling], device)
        )
        request.append(int(token), float(log_prob), self.version)
        request.stop_reason = self._rules.stop_reason(request)

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        load_weights(self._policy, weights)
