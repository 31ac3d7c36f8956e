"""The native engine over tensor-parallel ranks, as threads of one process."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from hone.agents.loop_thread import run_with_engine
from hone.rollout.contract import RolloutError, Sampling

from .. import (  # noqa: F401
    clauses_control,
    clauses_failure,
    clauses_kept,
    clauses_lifecycle,
    clauses_model,
    clauses_sampling,
)
from ..engine_contract import CLAUSES, Factory, driving, verify
from ..models import policy
from .slot import PagedSlotFactory, Slot, SlotFactory

PAGED = ("phase", "weights", "preempt", "prefix", "abort")
"""The clauses with these words also run over the paged core; test_sharding.py compares its tokens."""
CASES = [(name, SlotFactory()) for name, c in CLAUSES.items() if c.applies(SlotFactory())]
CASES += [
    (name, PagedSlotFactory())
    for name, c in CLAUSES.items()
    if c.applies(PagedSlotFactory()) and any(word in name for word in PAGED)
]
LONG = Sampling(60, 1.0, 0, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "factory"), CASES, ids=[f"{f.name}-{n}" for n, f in CASES])
def test_contract(name: str, factory: Factory) -> None:
    verify(name, factory)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_ends_all_with_its_cause(rank: int) -> None:
    slot = Slot(policy())
    step, calls = slot.cores[rank].step, []

    def breaking(should_return: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("no room on this rank")
        return step(should_return)

    slot.cores[rank].step = breaking  # type: ignore[method-assign]
    slot.follow()
    with pytest.raises(RolloutError, match="no room on this rank"):
        run_with_engine(slot.leader, slot.leader.generate([3, 4], LONG, "a"))
    slot.join()
    (error,) = slot.errors
    assert "no room on this rank" in str(error)
    if rank == 0:
        assert "rank 0 of 2 tensor-parallel ranks failed: MemoryError" in str(error)
    with pytest.raises(RolloutError, match="build a new one"):
        asyncio.run(slot.followers[0].begin_update())


def test_a_refused_update_is_told_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the driving thread sends commands too; two threads must not send at once."""
    leader: Any = Slot(policy()).leader
    refusals: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        leader._leader_core,
        "send",
        lambda command: refusals.append((command["refused"], leader._step_lock.locked())),
    )
    monkeypatch.setattr(leader, "_awaited_requests", lambda: ["a request"])
    with pytest.raises(RolloutError, match="begin_update while 1 requests run"):
        asyncio.run(leader.begin_update())
    ((refusal, between_steps),) = refusals
    assert "begin_update while 1 requests run" in refusal
    assert between_steps


def test_no_thread_outlives_a_closed_slot() -> None:
    slot = Slot(policy())
    slot.follow()
    with driving(slot.leader):
        pass
    asyncio.run(slot.leader.close())
    slot.join()
    assert not slot.errors
    assert not [t for t in threading.enumerate() if t in slot.threads]
