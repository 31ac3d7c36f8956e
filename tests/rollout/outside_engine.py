"""A custom rollout engine with weights of its own, which runs `transformers` without batching."""

from __future__ import annotations

import asyncio

import torch
from transformers import AutoModelForCausalLM

from hone.rollout.contract import RolloutError, RolloutSpec, StopReason, TokenOutput, Traits


class OwnWeightsEngine:
    traits = Traits(uses_policy_module=False, pause_keeps_requests=False)
    version = 0

    def __init__(self, spec: RolloutSpec) -> None:
        self.lm = AutoModelForCausalLM.from_pretrained(spec.model_path, dtype=spec.dtype).eval()
        self.eos_ids, self.updating = set(spec.eos_ids), False
        self.open, self.aborts = asyncio.Event(), 0
        self.open.set()

    async def generate(self, prompt_ids, sampling, request_id, *, on_tokens=None, **_):
        await self.open.wait()
        if self.updating:
            raise RolloutError(f"request {request_id} between begin_update and commit")
        ids, log_probs, versions, aborts = list(prompt_ids), [], [], self.aborts
        for position in range(len(ids), len(ids) + sampling.max_tokens):
            with torch.inference_mode():
                logits = self.lm(torch.tensor([ids])).logits[0, -1] / (sampling.temperature or 1.0)
            generator = torch.Generator().manual_seed((sampling.seed * 7919 + position) % 2**63)
            token = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
            log_probs.append(float(logits.log_softmax(-1)[token]))
            versions.append(self.version)
            ids.append(token)
            await asyncio.sleep(0)
            if token in self.eos_ids or self.aborts != aborts:
                break
        reason = StopReason.STOP if ids[-1] in self.eos_ids else StopReason.LENGTH
        return TokenOutput(ids[len(prompt_ids) :], log_probs, versions, reason)

    async def begin_update(self):
        self.updating = True

    async def load(self, weights):
        self.lm.load_state_dict(dict(weights), strict=False)

    async def commit(self, version):
        self.version, self.updating = version, False

    async def pause(self, keep=False):
        self.aborts += 1
        self.open.clear()

    async def resume(self):
        self.open.set()

    async def abort(self, request_ids=None):
        self.aborts += 1

    async def sleep(self): ...

    async def wake_up(self): ...

    async def close(self): ...


class HalfAnEngine:
    """Lacks most of the contract."""

    traits = Traits(uses_policy_module=True)

    def __init__(self, spec: RolloutSpec) -> None:
        pass
