"""The engines under contract."""

from __future__ import annotations

from typing import Any

from hone.models.policy import PolicyModel
from hone.ops.counter_rng import fold_seed
from hone.rollout.contract import RolloutEngine
from hone.rollout.hf import HFRollout
from hone.rollout.native.core import NativeCore
from hone.rollout.native.decoder import ModuleDecoder, PlainDecoder
from hone.rollout.native.engine import NativeRollout
from hone.rollout.requests import Request, RequestRules
from hone.rollout.scripted import ScriptedRollout

from .engine_contract import Factory, Place
from .models import EOS, TOKENIZER, VOCABULARY


class NativeFactory(Factory):
    name = "native"
    engine_traits = NativeRollout.traits
    probes = frozenset({"model", "prefill", "memory"})
    core_class: type[NativeCore] = NativeCore
    engine_class: type[NativeRollout] = NativeRollout

    def build(self, policy: PolicyModel, *, max_num_seqs: int = 64) -> RolloutEngine:
        core = self.core_class(
            policy,
            eos_ids=(EOS,),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=256,
            tokenizer=TOKENIZER,
        )
        return self.engine_class(core)

    def prefilled_tokens(self, engine: Any) -> int:
        return engine._core.prefilled_tokens

    def held_bytes(self, engine: Any) -> int:
        return engine._core.cache.nbytes

    def phases(self, engine: Any) -> dict[str, Place]:
        core = engine._core
        return {
            "add": (core, "add"),
            "cache": (core.cache, "reserve"),
            "forward": (core, "_hidden"),
            "sample": (core, "_draw"),
            "stop": (RequestRules, "stop_reason"),
            "retire": (core, "_retire"),
            "deliver": (engine, "_deliver"),
            "answer": (Request, "output"),
        }


class PlainNativeFactory(NativeFactory):
    """Fails where the fast forward is silently not taken."""

    probes = NativeFactory.probes | {"bits"}

    def build(self, policy: PolicyModel, *, max_num_seqs: int = 64) -> RolloutEngine:
        engine: Any = super().build(policy, max_num_seqs=max_num_seqs)
        assert type(engine._core._forward) is PlainDecoder
        return engine


class ModuleNativeFactory(NativeFactory):
    """The native engine through the model's own modules."""

    name = "native-modules"

    def build(self, policy: PolicyModel, *, max_num_seqs: int = 64) -> RolloutEngine:
        engine: Any = super().build(policy, max_num_seqs=max_num_seqs)
        engine._core._forward = ModuleDecoder(policy)
        return engine


class HFFactory(Factory):
    name = "hf"
    engine_traits = HFRollout.traits
    probes = frozenset({"model"})
    draws = 200
    long_tokens = 100

    def build(self, policy: PolicyModel, *, max_num_seqs: int = 64) -> RolloutEngine:
        return HFRollout(policy, eos_ids=(EOS,), tokenizer=TOKENIZER)

    def phases(self, engine: Any) -> dict[str, Place]:
        return {"forward": (engine, "_draw_one"), "stop": (RequestRules, "stop_reason")}


class ScriptedFactory(Factory):
    """Says a fixed scramble of the prompt: enough for every clause about manners."""

    name = "scripted"
    engine_traits = ScriptedRollout.traits

    def build(self, policy: PolicyModel, *, max_num_seqs: int = 64) -> RolloutEngine:
        def scramble(prompt: list[int]) -> list[int]:
            return [2 + fold_seed(i, *prompt) % (VOCABULARY - 2) for i in range(1000)]

        return ScriptedRollout(
            scramble, tokenizer=TOKENIZER, eos_ids=(EOS,), seconds_per_token=0.0005
        )

    def phases(self, engine: Any) -> dict[str, Place]:
        return {"script": (engine, "_next_answer"), "stop": (RequestRules, "stop_reason")}
