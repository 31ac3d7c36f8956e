"""The slow, obvious engine: every token by one full forward over its own sequence, no cache, no batch.

It exists to be compared with. Tokens come from the same sampling law as the native engine's, so that
on the same weights both say the same; nothing else is shared but the policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from hone.models.attention import forward_options
from hone.models.policy import PolicyModel
from hone.ops.segments import SegmentLayout
from hone.rollout.contract import OnTokens, Sampling, TokenOutput, Traits
from hone.rollout.gate import RequestGate
from hone.rollout.native.sampler import SamplingRows, draw
from hone.rollout.requests import Request, RequestRules, refuse_media
from hone.rollout.weights import load_weights
from hone.tokenizer import Tokenizer
from hone.types import Settings


class HFRollout:
    """A `RolloutEngine` that decodes in the event loop, one token per turn of the loop."""

    traits = Traits(decodes_with_module=True, adapters=True)

    def __init__(
        self, policy: PolicyModel, *, eos_ids: Sequence[int], tokenizer: Tokenizer | None
    ) -> None:
        self._policy = policy
        self._rules = RequestRules.of(policy.lm.config, eos_ids, tokenizer)
        self._gate = RequestGate()
        self.version = 0

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        *,
        on_tokens: OnTokens | None = None,
        multi_modal_data: Settings | None = None,
    ) -> TokenOutput:
        refuse_media(request_id, multi_modal_data, "hf")
        request = Request(list(prompt_ids), sampling, request_id, on_tokens=on_tokens)
        self._rules.check(request)
        with self._gate.admitted(request):
            while await self._gate.turn(request):
                with self._gate.step(request) as may_draw:
                    if may_draw:
                        self._draw_one(request)
                request.stream()
                await asyncio.sleep(0)
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

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        self._gate.abort(request_ids)

    async def pause(self, keep: bool = False) -> None:
        self._gate.pause(keep)

    async def resume(self) -> None:
        self._gate.resume()

    async def begin_update(self) -> None:
        self._gate.begin_update()

    async def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        with self._gate.loading():
            load_weights(self._policy, weights)

    async def commit(self, version: int) -> None:
        self._gate.commit()
        self.version = version

    async def sleep(self) -> None:
        """Nothing is kept between tokens."""

    async def wake_up(self) -> None:
        """Nothing was given back."""

    async def close(self) -> None:
        """Running requests end as aborted; later ones are refused."""
        self._gate.close()
