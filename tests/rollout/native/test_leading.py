"""The native engine over tensor-parallel ranks, as threads of one process."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import torch

from hone.agents.loop_thread import run_beside
from hone.rollout.contract import RolloutError, Sampling
from hone.rollout.native.peers import PeerLost

from .. import clauses_control, clauses_failure, clauses_lifecycle, clauses_model, clauses_sampling  # noqa: F401
from ..engine_contract import CLAUSES, Factory, driving, verify
from ..models import policy
from .slot import PagedSlotFactory, Slot, SlotFactory, SlotRollout

ENGINES = [SlotFactory(), PagedSlotFactory()]
CASES = [(c.name, f) for f in ENGINES for c in CLAUSES.values() if c.applies(f)]
LONG = Sampling(60, 1.0, 0, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "factory"), CASES, ids=[f"{f.name}-{n}" for n, f in CASES])
def test_contract(name: str, factory: Factory) -> None:
    verify(name, factory)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_ends_all_with_its_cause(rank: int) -> None:
    slot = Slot(policy())
    step, calls = slot.cores[rank].step, []

    def breaking(must_yield: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("no room on this rank")
        return step(must_yield)

    slot.cores[rank].step = breaking  # type: ignore[method-assign]
    slot.follow()
    with pytest.raises(RolloutError, match="no room on this rank"):
        run_beside(slot.leader, slot.leader.generate([3, 4], LONG, "a"))
    slot.join()
    (error,) = slot.errors
    assert "no room on this rank" in str(error)
    if rank == 0:
        assert "rank 0 of 2 tensor-parallel ranks failed: MemoryError" in str(error)
    with pytest.raises(RolloutError, match="build another"):
        asyncio.run(slot.followers[0].begin_update())


def test_a_silent_first_rank_is_noticed_and_a_waiting_one_is_not() -> None:
    slot = Slot(policy(), timeout_s=1.0)
    slot.follow()
    with driving(slot.leader):  # sends a command every quarter of a second
        time.sleep(1.6)
        assert not slot.errors
    time.sleep(1.6)  # `drive` has ended without a word to the others
    slot.join()
    (error,) = slot.errors
    assert isinstance(error, PeerLost)
    assert "did not answer within 1 s" in str(error)


def test_weights_change_between_two_steps_on_all_ranks() -> None:
    """Each rank gets its weights at its own time, while requests run."""
    engine: Any = SlotRollout(Slot(policy()))
    other = [(n, p * 1.5) for n, p in policy().lm.named_parameters() if "norm" not in n]
    follower = engine.slot.followers[0]
    begin = follower.begin_update

    async def late() -> None:
        time.sleep(0.2)
        await begin()

    follower.begin_update = late

    async def updated() -> Any:
        job = asyncio.create_task(engine.generate([3, 4], LONG, "a"))
        await asyncio.sleep(0.05)
        await engine.pause(keep=True)
        await engine.begin_update()
        await engine.load(other)
        await engine.commit(1)
        await engine.resume()
        return await job

    out = run_beside(engine, updated())
    assert len(out.token_ids) == LONG.max_tokens
    assert out.versions[-1] == 1
    first, second = (core.policy for core in engine.slot.cores)
    name = "model.layers.0.mlp.up_proj.weight"
    whole = torch.cat([dict(p.lm.named_parameters())[name] for p in (first, second)])
    assert torch.equal(whole, dict(other)[name])


def test_requests_go_to_the_first_rank() -> None:
    slot = Slot(policy())
    with pytest.raises(RolloutError, match="requests go to the first rank"):
        asyncio.run(slot.followers[0].generate([3], LONG, "a"))


def test_ranks_that_drew_different_tokens_stop() -> None:
    slot = Slot(policy())
    draw = slot.cores[1]._draw  # type: ignore[attr-defined]

    def wrong(logits: torch.Tensor) -> None:
        draw(logits.roll(1, -1))

    slot.cores[1]._draw = wrong  # type: ignore[attr-defined]
    slot.follow()
    with pytest.raises(RolloutError, match="sampled different tokens"):
        run_beside(slot.leader, slot.leader.generate([3, 4], LONG, "a"))
    slot.join()


def test_no_thread_outlives_a_closed_slot() -> None:
    slot = Slot(policy())
    slot.follow()
    with driving(slot.leader):
        pass
    asyncio.run(slot.leader.close())
    slot.join()
    assert not slot.errors
    assert not [t for t in threading.enumerate() if t in slot.threads]
