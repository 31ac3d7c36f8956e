"""The engines that the contract tests build."""

from __future__ import annotations

import asyncio
import copy
import random
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from typing import Any

import pytest

from hone.models.policy import PolicyModel
from hone.ops.counter_rng import fold_seed
from hone.rollout.contract import RolloutEngine, Sampling, Traits
from hone.rollout.hf import HFRollout
from hone.rollout.native.core import NativeCore
from hone.rollout.native.decoder import ModuleDecoder, PrepackedDecoder
from hone.rollout.native.engine import NativeRollout
from hone.rollout.requests import Chunk, Request, RequestRules
from hone.rollout.scripted import ScriptedRollout
from hone.rollout.server import ServerRollout
from hone.rollout.server_weights import WeightFolder
from hone.rollout.sglang_server import SGLangServer
from hone.rollout.streaming_engine import StreamingEngine

from .contract_server import ContractServer
from .engine_contract import Factory, Place
from .models import EOS, TOKENIZER, VOCABULARY


@contextmanager
def slow_motion() -> Iterator[None]:
    """In the block, native engines run one step after each arrival of requests; then the requests wait."""
    step = NativeRollout._step

    def one_step(engine: NativeRollout) -> list[Request]:
        if engine._arrivals:
            return step(engine)
        time.sleep(0.001)
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeRollout, "_step", one_step)
        patch.setattr(NativeRollout, "_should_return", lambda engine: True)
        yield


@contextmanager
def slow_streams(engine_class: type[StreamingEngine]) -> Iterator[None]:
    """In the block, the requests of these engines wait after two tokens."""
    stream, is_over = engine_class._backend_stream, False

    async def two_tokens(
        engine: Any, request: Request, sampling: Sampling
    ) -> AsyncGenerator[Chunk, None]:
        async with aclosing(stream(engine, request, sampling)) as chunks:
            async for chunk in chunks:
                yield chunk
                while len(request.token_ids) >= 2 and not is_over:
                    await asyncio.sleep(0.001)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_class, "_backend_stream", two_tokens)
        try:
            yield
        finally:
            is_over = True


class NativeFactory(Factory):
    name = "native"
    engine_traits = NativeRollout.traits
    probes = frozenset({"model", "prefill", "memory", "queue"})
    core_class: type[NativeCore] = NativeCore
    engine_class: type[NativeRollout] = NativeRollout
    slow_motion = staticmethod(slow_motion)

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

    def decoding_policy(self, engine: Any, policy: PolicyModel) -> PolicyModel:
        return engine._core.policy

    def phases(self, engine: Any) -> dict[str, Place]:
        core = engine._core
        return {
            "add": (core, "add"),
            "cache": (core.cache, "reserve"),
            "forward": (core, "_hidden_states"),
            "sample": (core, "_sample"),
            "stop": (RequestRules, "stop_reason"),
            "retire": (core, "_remove_finished"),
            "deliver": (engine, "_deliver"),
            "answer": (Request, "output"),
        }


class PlainNativeFactory(NativeFactory):
    """Fails if the engine does not use the fast forward."""

    probes = NativeFactory.probes | {"bits"}

    def build(self, policy: PolicyModel, *, max_num_seqs: int = 64) -> RolloutEngine:
        engine: Any = super().build(policy, max_num_seqs=max_num_seqs)
        assert type(engine._core._forward) is PrepackedDecoder
        return engine


class ModuleNativeFactory(NativeFactory):
    """The native engine with the model's own modules."""

    name = "native-modules"
    is_slow = True

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
    is_slow = True

    def build(self, policy: PolicyModel, *, max_num_seqs: int = 64) -> RolloutEngine:
        return HFRollout(policy, eos_ids=(EOS,), tokenizer=TOKENIZER)

    def slow_motion(self) -> AbstractContextManager[None]:
        return slow_streams(HFRollout)

    def phases(self, engine: Any) -> dict[str, Place]:
        return {"forward": (engine, "_sample_token"), "stop": (RequestRules, "stop_reason")}


class SGLangFactory(Factory):
    """The SGLang engine over a contract server; the server ends with the engine."""

    name = "sglang-contract"
    engine_traits = Traits(uses_policy_module=False)
    probes = frozenset({"model", "queue"})
    is_slow = True
    draws = 200
    long_tokens = 120
    servers = 1
    send_tensors = False
    slow_motion = staticmethod(slow_motion)

    def build(self, policy: PolicyModel, *, max_num_seqs: int = 64) -> RolloutEngine:
        servers = [
            ContractServer(copy.deepcopy(policy), max_num_seqs=max_num_seqs)
            for _ in range(self.servers)
        ]
        engine = server_engine(servers, send_tensors=self.send_tensors)
        close = engine.close

        async def close_all() -> None:
            await close()
            for server in servers:
                await asyncio.to_thread(server.close)
            servers.clear()

        engine.close = close_all  # type: ignore[method-assign]
        return engine

    def phases(self, engine: Any) -> dict[str, Place]:
        (server, *_) = engine._servers
        return {
            "route": (engine, "_route"),
            "forward": (server, "stream"),
            "append": (engine, "_append"),
        }


def server_engine(
    servers: list[ContractServer],
    *,
    call_timeout_s: float = 30.0,
    start_timeout_s: float = 30.0,
    **options: Any,
) -> ServerRollout:
    model = servers[0].policy.lm
    engine = ServerRollout(
        [SGLangServer(s.url, start_timeout_s, call_timeout_s, eos_ids=(EOS,)) for s in servers],
        RequestRules.of(model.config, (EOS,), TOKENIZER),
        dict(model.named_parameters(remove_duplicate=False)),
        WeightFolder(None, "no-such-folder"),
        **options,
    )
    asyncio.run(engine.start())
    return engine


class ScriptedFactory(Factory):
    """Answers with a fixed permutation of the prompt, for all clauses that need no model."""

    name = "scripted"
    engine_traits = ScriptedRollout.traits

    def build(self, policy: PolicyModel, *, max_num_seqs: int = 64) -> RolloutEngine:
        def scramble(prompt: list[int]) -> list[int]:
            draws = random.Random(fold_seed(*prompt))
            return [draws.randrange(2, VOCABULARY) for _ in range(1000)]

        return ScriptedRollout(
            scramble, tokenizer=TOKENIZER, eos_ids=(EOS,), seconds_per_token=0.0005
        )

    def slow_motion(self) -> AbstractContextManager[None]:
        return slow_streams(ScriptedRollout)

    def phases(self, engine: Any) -> dict[str, Place]:
        return {"script": (engine, "_next_answer"), "stop": (RequestRules, "stop_reason")}
