"""The slow, obvious engine: every token by one full forward over its own sequence, no cache, no batch.

It exists to be compared with. Tokens come from the same sampling law as the native engine's, so that
on the same weights both say the same; nothing else is shared but the policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from hone.event_loop import run_to_end
from hone.models.attention import forward_options
from hone.models.policy import PolicyModel
from hone.ops.segments import SegmentLayout
from hone.rollout.contract import RolloutError, Sampling, StopReason, TokenOutput
from hone.rollout.native.sampler import SamplingRows, draw
from hone.rollout.requests import AbortGate, Request, RequestRules, refuse_media
from hone.rollout.weights import load_weights

T = TypeVar("T")


class HFRollout:
    """A `RolloutEngine` that decodes in the event loop, a token a turn."""

    def __init__(self, policy: PolicyModel, *, eos_ids: Sequence[int], tokenizer: Any) -> None:
        self._policy = policy
        self._rules = RequestRules.of(policy.lm.config, eos_ids, tokenizer)
        self._gate = AbortGate()
        self._closed = False
        self.version = 0

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        multi_modal_data: Mapping[str, Any] | None = None,
    ) -> TokenOutput:
        refuse_media(request_id, multi_modal_data, "hf")
        request = Request(list(prompt_ids), sampling, request_id)
        self._rules.check(request)
        aborts_before = await self._gate.enter()
        if self._closed:
            raise RolloutError(f"request {request_id} came to an engine that is closed")
        while request.stop_reason is None:
            await asyncio.sleep(0)
            self._gate.raise_failure()
            if self._gate.aborts != aborts_before:
                request.stop_reason = StopReason.ABORT
            else:
                with self._gate.failing_all():
                    self._draw_one(request)
        return request.output()

    @torch.inference_mode()
    def _draw_one(self, request: Request) -> None:
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
        token, log_prob = draw(logits, position, SamplingRows.of([request.sampling], device))
        request.token_ids.append(int(token))
        request.log_probs.append(float(log_prob))
        request.versions.append(self.version)
        request.stop_reason = self._rules.stop_reason(request)

    def play(self, loops: Coroutine[Any, Any, T]) -> T:
        return run_to_end(loops)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        load_weights(self._policy, weights)
        self.version = version

    def abort(self) -> None:
        self._gate.abort()

    def resume(self) -> None:
        self._gate.resume()

    def sleep(self) -> None:
        """Nothing is kept between tokens."""

    def wake_up(self) -> None:
        """Nothing was given back."""

    def close(self) -> None:
        """Running requests end as aborted; later ones are refused."""
        self._closed = True
        self._gate.abort()
        self._gate.resume()
