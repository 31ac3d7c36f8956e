"""The engines of ranks above 0: they load weights by themselves, and refuse requests."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch

from hone.agents.loop_thread import run_with_engine
from hone.rollout.contract import RolloutError, Sampling

from ..engine_contract import driving
from ..factories import slow_motion
from ..models import policy
from .slot import Slot, SlotRollout

LONG = Sampling(60, 1.0, 0, ignore_eos=True)


def test_weights_change_between_two_steps_on_all_ranks() -> None:
    """Each rank loads its weights at another time, while requests run."""
    engine: Any = SlotRollout(Slot(policy()))
    other = [(n, p * 1.5) for n, p in policy().lm.named_parameters() if "norm" not in n]
    follower = engine.slot.followers[0]
    begin = follower.begin_update

    async def late() -> None:
        time.sleep(0.2)
        await begin()

    follower.begin_update = late

    async def updated() -> Any:
        some = asyncio.Event()
        with slow_motion():
            job = asyncio.create_task(
                engine.generate([3, 4], LONG, "a", on_tokens=lambda delta: some.set())
            )
            await some.wait()
            await engine.pause(keep=True)
        await engine.begin_update()
        await engine.load(other)
        await engine.commit(1)
        await engine.resume()
        return await job

    out = run_with_engine(engine, updated())
    assert len(out.token_ids) == LONG.max_tokens
    assert (out.versions[0], out.versions[-1]) == (0, 1)
    first, second = (core.policy for core in engine.slot.cores)
    name = "model.layers.0.mlp.up_proj.weight"
    joined = torch.cat([dict(p.lm.named_parameters())[name] for p in (first, second)])
    assert torch.equal(joined, dict(other)[name])


def test_an_update_that_does_not_end_fails_all_ranks_with_the_cause() -> None:
    slot = Slot(policy())
    slot.peers[1].timeout_s = 0.05
    slot.follow()
    asyncio.run(slot.leader.begin_update())
    slot.join()
    (error,) = slot.errors
    assert "a weight update did not end on this rank within 0.1 s" in str(error)
    with pytest.raises(RolloutError, match=r"rank 1 of 2 .* did not end on this rank"):
        slot.leader._leader_core.send({"do": "wait"})


def test_requests_go_to_the_first_rank() -> None:
    slot = Slot(policy())
    with pytest.raises(RolloutError, match="send requests to rank 0"):
        asyncio.run(slot.followers[0].generate([3], LONG, "a"))


def test_a_rank_that_was_too_early_for_an_update_begins_the_next() -> None:
    slot = Slot(policy())
    (follower,) = slot.followers
    slot.follow()
    slot.peers[1].timeout_s = 0.05
    with driving(slot.leader):
        while not follower._is_driven:
            time.sleep(0.001)
        with pytest.raises(RolloutError, match=r"rank 0 began no update within 0\.05 s"):
            asyncio.run(follower.begin_update())
        slot.peers[1].timeout_s = 20.0
        asyncio.run(slot.leader.begin_update())
        asyncio.run(follower.begin_update())
        asyncio.run(follower.commit(1))
        asyncio.run(slot.leader.commit(1))
    slot.leader.release()
    slot.join()
    assert not slot.errors
