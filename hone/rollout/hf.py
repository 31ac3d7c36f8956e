"""The slow reference engine: every token is a full forward of one sequence, without cache or batching.

Tests compare the native engine with this one; the two share only the policy and the sampling function.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import torch

from hone.models.policy import PolicyModel, forward_options
from hone.ops.attention import SegmentLayout
from hone.rollout.contract import Sampling, Traits, Weights
from hone.rollout.native.sampler import SamplingRows, sample_tokens
from hone.rollout.requests import Chunk, Request, RequestRules
from hone.rollout.streaming_engine import StreamingEngine
from hone.rollout.weights import load_weights
from hone.tokenizer import Tokenizer


class HFRollout(StreamingEngine):
    """A `RolloutEngine` that decodes one token of one request at a time."""

    name = "hf"
    traits = Traits(uses_policy_module=True, loads_adapters=True)

    def __init__(
        self, policy: PolicyModel, *, eos_ids: Sequence[int], tokenizer: Tokenizer | None
    ) -> None:
        super().__init__(RequestRules.of(policy.lm.config, eos_ids, tokenizer))
        self._policy = policy

    async def _backend_stream(
        self, request: Request, sampling: Sampling
    ) -> AsyncGenerator[Chunk, None]:
        while True:
            yield self._sample_token([*request.prompt_ids, *request.token_ids], sampling)

    @torch.inference_mode()
    def _sample_token(self, token_ids: list[int], sampling: Sampling) -> Chunk:
        device = next(self._policy.parameters()).device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # the engine's thread starts on device 0
        ids = torch.tensor(token_ids, device=device)
        layout = SegmentLayout([len(ids)], []).to(device)
        hidden = self._policy.decoder(
            input_ids=ids[None],
            position_ids=torch.arange(len(ids), device=device)[None],
            use_cache=False,
            **forward_options(self._policy.decoder, layout),
        ).last_hidden_state[0]
        logits = self._policy.logits(hidden[-1:])
        position = torch.tensor([len(ids)], device=device)
        token, log_prob = sample_tokens(logits, position, SamplingRows.of([sampling], device))
        return Chunk([int(token)], [float(log_prob)])

    async def _load(self, weights: Weights) -> None:
        load_weights(self._policy, weights)
