"""vLLM with several workers passes the main contract tests, and new weights reach every shard."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from hone.agents.loop_thread import run_with_engine
from hone.event_loop import run_coroutine
from hone.rollout.contract import Sampling

from . import (  # noqa: F401
    clauses_control,
    clauses_lifecycle,
    clauses_model,
    clauses_sampling,
    models,
)
from .engine_contract import verify
from .vllm_factory import SharedVLLM, VLLMFactory, process, vllm

CORE = (
    "greedy decoding equals transformers generate",
    "log probs are the trainers",
    "a kept request takes new weights from its next token",
    "half an update is never asked for tokens",
    "abort ends the named requests alone",
    "a draw depends on the absolute position",
)


class StagedVLLM(SharedVLLM):
    shared_process = staticmethod(partial(process, pipeline=2))


class BroadcastVLLM(SharedVLLM):
    shared_process = staticmethod(partial(process, tensor=2, weights="distributed"))


class TwoStages(VLLMFactory):
    """Two pipeline stages, which read the weights from the same memory."""

    engine_class = StagedVLLM


class TwoShards(VLLMFactory):
    """Two tensor-parallel workers, of which the second gets the weights by broadcast."""

    engine_class = BroadcastVLLM


@vllm
@pytest.mark.usefixtures("heads_of_32_numbers")
@pytest.mark.parametrize("name", CORE)
@pytest.mark.parametrize("factory", [TwoStages, TwoShards])
def test_contract(name: str, factory: type[VLLMFactory]) -> None:
    verify(name, factory())


@vllm
@pytest.mark.usefixtures("heads_of_32_numbers")
def test_a_worker_that_dies_between_two_broadcasts_costs_no_weight() -> None:
    """The other worker waits for the dead one, so all workers restart with the weights of the update."""
    engine = BroadcastVLLM(models.policy(), 8)
    (prompt,) = models.prompts(1, 20)
    new = models.policy(seed=1)

    async def updated() -> tuple[list[int], list[float]]:
        await engine.prepare(models.policy())
        before = engine._processes[0].pid
        await engine.begin_update()
        first, *others = new.lm.named_parameters()
        await engine.load([first])
        os.kill(max(workers(before)), signal.SIGKILL)
        await engine.load(others)
        await engine.commit(1)
        assert engine._processes[0].pid != before
        out = await engine.generate(prompt, Sampling(12, 1.0, 7, ignore_eos=True), "r")
        assert out.versions == [1] * 12
        return out.token_ids, out.log_probs

    tokens, log_probs = run_with_engine(engine, updated())
    run_coroutine(engine.close())
    expected = models.trainer_log_probs(new, prompt, tokens, 1.0)
    assert log_probs == pytest.approx(expected, abs=1e-4)


def workers(pid: int) -> list[int]:
    """Returns the worker processes of a vLLM process."""
    children = (Path(f"/proc/{pid}/task") / str(pid) / "children").read_text().split()
    return [
        int(child)
        for child in children
        if "resource_tracker" not in Path(f"/proc/{child}/cmdline").read_text()
    ]
