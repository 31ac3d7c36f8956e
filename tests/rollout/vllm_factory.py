"""vLLM for the contract tests: all engines of a session share one process, because its start is slow."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hone.event_loop import run_coroutine
from hone.models.policy import PolicyModel
from hone.rollout.contract import RolloutEngine, Sampling, Traits
from hone.rollout.requests import Chunk, Request, RequestRules
from hone.rollout.vllm import VLLMRollout
from hone.rollout.vllm_process import EngineProcess, LaunchArguments

from .engine_contract import Factory, Place
from .models import EOS, POSITIONS, TOKENIZER, policy

SHAPE = {"hidden": 64, "mlp": 64, "heads": 2, "kv_heads": 1}
"""32 features per head, the minimum of vLLM's CPU kernels."""


def vllm_python() -> str | None:
    """The interpreter that has vLLM: $HONE_VLLM_PYTHON, or that of `make setup-vllm`."""
    built = Path(__file__).parents[2] / ".venv-vllm/bin/python"
    return os.environ.get("HONE_VLLM_PYTHON") or (str(built) if built.exists() else None)


if (python := vllm_python()) is not None:
    # vLLM's cache of facts about models stays for later test sessions.
    os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(python).absolute().parents[1] / "cache"))

MAX_NUM_SEQS = 64
SLOW_MOTION = "slow_motion:SlowMotion"

needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        vllm_python() is None, reason="no vLLM: `make setup-vllm` builds .venv-vllm"
    ),
]


@cache
def slow_motion_file() -> Path:
    """While this file exists, every vLLM process of the session samples slowly."""
    return Path(tempfile.mkdtemp(prefix="hone-test-slow-")) / "on"


@cache
def slow_motion_python() -> str:
    """vLLM's interpreter, with the logits processor of `SLOW_MOTION` on its path."""
    python = slow_motion_file().with_name("python")
    folder = Path(__file__).with_name("slow_motion")
    python.write_text(
        f"#!/bin/sh\nexport HONE_SLOW_MOTION={slow_motion_file()}\n"
        f'export PYTHONPATH="{folder}${{PYTHONPATH:+:$PYTHONPATH}}"\nexec {vllm_python()} "$@"\n'
    )
    python.chmod(0o755)
    return str(python)


@contextmanager
def slow_motion() -> Iterator[None]:
    slow_motion_file().touch()
    try:
        yield
    finally:
        slow_motion_file().unlink()


def vllm(test: Any) -> Any:
    """Decorator: the marks of a test that needs vLLM."""
    for mark in needs_vllm:
        test = mark(test)
    return test


@cache
def loop() -> asyncio.AbstractEventLoop:
    """The event loop of the shared process; its thread lives as long as the tests."""
    own = asyncio.new_event_loop()
    threading.Thread(target=own.run_forever, daemon=True).start()
    return own


@cache
def process(tensor: int = 1, pipeline: int = 1, weights: str = "auto") -> EngineProcess:
    """One process per layout of its workers."""
    from hone.rollout.vllm_build import make_environment

    folder = tempfile.mkdtemp(prefix="hone-test-vllm-")
    policy(seed=9).lm.save_pretrained(folder)  # no test has these weights
    arguments = {
        "model": folder,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": POSITIONS,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": 64,  # prefills are split
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "distributed_executor_backend": "uni" if tensor * pipeline == 1 else "mp",
        "disable_log_stats": True,
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
        "logprobs_mode": "raw_logprobs",
        "async_scheduling": False,
        "scheduling_policy": "priority",
        "seed": 0,
        "logits_processors": [SLOW_MOTION],
    }
    launch = LaunchArguments(
        slow_motion_python(), arguments, make_environment(False, None), weights=weights
    )
    started = EngineProcess(launch)
    asyncio.run_coroutine_threadsafe(started.start(), loop()).result()
    started.serving = True
    return started


class SharedVLLM(VLLMRollout):
    """An engine of its own over the process of all tests, with the policy's weights."""

    shared_process = staticmethod(process)

    def __init__(self, model: PolicyModel, max_num_seqs: int) -> None:
        """The process has one limit for all tests; a lower `max_num_seqs` is held here."""
        lm: Any = model.lm
        self._slots = asyncio.Semaphore(max_num_seqs if max_num_seqs < MAX_NUM_SEQS else 1000)
        super().__init__(
            [self.shared_process()],
            RequestRules.of(lm.config, (EOS,), TOKENIZER),
            dict(lm.named_parameters()),
            bucket_bytes=2**14,
            device=torch.device("cpu"),
        )
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop = loop()

    async def _backend_stream(
        self, request: Request, sampling: Sampling
    ) -> AsyncGenerator[Chunk, None]:
        async with self._slots, aclosing(super()._backend_stream(request, sampling)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def prepare(self, model: PolicyModel) -> None:
        await VLLMRollout.begin_update(self)
        await VLLMRollout.load(self, model.lm.named_parameters())
        await VLLMRollout.commit(self, 0)
        await VLLMRollout.resume(self)
        await self._submit(self._processes[0].call("resume"))

    async def close(self) -> None:
        if not self._closed:
            closing = self._submit(self._close())
            self._closed = True
            await closing

    async def _close(self) -> None:
        """Ends the requests; the next test uses the process and the event loop."""
        self._closed = True
        self._end(self._running)
        self._not_paused.set()
        while self._running:
            await asyncio.sleep(0.001)


class VLLMFactory(Factory):
    name = "vllm"
    engine_traits = Traits(uses_policy_module=False)
    probes = frozenset({"model", "queue"})
    smallest_queue = MAX_NUM_SEQS
    draws = 400
    long_tokens = 600
    engine_class: type[SharedVLLM] = SharedVLLM
    slow_motion = staticmethod(slow_motion)

    def build(self, policy: PolicyModel, *, max_num_seqs: int = 64) -> RolloutEngine:
        engine = self.engine_class(policy, max_num_seqs)
        run_coroutine(engine.prepare(policy))
        return engine

    def phases(self, engine: Any) -> dict[str, Place]:
        return {
            "route": (engine, "_route"),
            "forward": (engine, "_append"),
            "stop": (RequestRules, "stop_reason"),
            "answer": (Request, "output"),
        }
