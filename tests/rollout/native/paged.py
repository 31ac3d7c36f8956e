"""The paged engine as the contract builds it; on a CPU it runs over the reference kernels."""

from __future__ import annotations

from typing import Any

from hone.models.policy import PolicyModel
from hone.rollout.contract import RolloutEngine, Sampling
from hone.rollout.native.decoder import FusedDecoder, ModuleDecoder
from hone.rollout.native.engine import NativeRollout
from hone.rollout.native.paged_core import PagedCore
from hone.rollout.requests import Request, RequestRules

from ..engine_contract import Place
from ..factories import NativeFactory
from ..models import EOS, POSITIONS, TOKENIZER


def paged_core(
    policy: PolicyModel, core_class: type[PagedCore] = PagedCore, **changed: Any
) -> PagedCore:
    options: dict[str, Any] = {
        "eos_ids": (EOS,),
        "max_num_seqs": 64,
        "max_num_batched_tokens": 256,
        "max_model_len": POSITIONS,
        "gpu_memory_utilization": 0.1,
        "tokenizer": TOKENIZER,
        "blocks": 700,
    }
    return core_class(policy, **(options | changed))


def ask(prompt: list[int], tokens: int = 20, seed: int = 0, **more: Any) -> Request:
    return Request(list(prompt), Sampling(tokens, 1.0, seed, ignore_eos=True, **more), f"r{seed}")


def finish(core: PagedCore, requests: list[Request]) -> list[list[int]]:
    for request in requests:
        core.add(request)
    while core.busy:
        core.step()
    return [request.token_ids for request in requests]


class PagedFactory(NativeFactory):
    name = "paged"
    decoder: type = FusedDecoder
    paged_core_class: type[PagedCore] = PagedCore

    def build(self, policy: PolicyModel, *, max_num_seqs: int = 64) -> RolloutEngine:
        core = paged_core(policy, self.paged_core_class, max_num_seqs=max_num_seqs)
        assert type(core._forward) is self.decoder
        return NativeRollout(core)

    def phases(self, engine: Any) -> dict[str, Place]:
        core = engine._core
        return {
            "add": (core, "add"),
            "cache": (core.cache, "reserve"),
            "admit": (core._scheduler, "admit"),
            "prefill": (core, "_prefill_hidden_states"),
            "sample": (core, "_sample"),
            "decode": (core, "_decode"),
            "read": (core, "_read_chunk"),
            "append": (core, "_append_tokens"),
            "stop": (RequestRules, "stop_reason"),
            "retire": (core, "_remove_finished"),
            "deliver": (engine, "_deliver"),
            "answer": (Request, "output"),
        }


class PagedModulesFactory(PagedFactory):
    """The paged engine with the model's own modules, as for models that the fast forward does not support."""

    name = "paged-modules"
    is_slow = True
    decoder = ModuleDecoder

    def build(self, policy: PolicyModel, *, max_num_seqs: int = 64) -> RolloutEngine:
        core = paged_core(policy, max_num_seqs=max_num_seqs)
        core._forward = core._decode_step._forward = ModuleDecoder(policy)
        return NativeRollout(core)
