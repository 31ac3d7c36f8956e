"""Commands and waits between ranks."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from hone.agents.loop_thread import run_with_engine
from hone.rollout.contract import RolloutError, Sampling
from hone.rollout.native.peers import Command, PeerLost, Peers

from ..engine_contract import driving
from ..models import policy
from .slot import Slot, on_ranks, peers_of


def test_a_first_rank_that_waits_sends_commands_before_the_timeout() -> None:
    slot = Slot(policy())
    receive, received = slot.peers[1].receive, list[Command]()

    def recorded() -> list[Command]:
        commands = receive()
        received.extend(commands)
        return commands

    slot.peers[1].receive = recorded  # type: ignore[method-assign]
    assert slot.leader._heartbeat_s <= slot.peers[1].timeout_s / 4
    slot.leader._heartbeat_s = 0.001
    slot.follow()
    with driving(slot.leader):
        while len(received) < 5:
            time.sleep(0.001)
    slot.leader.release()
    slot.join()
    assert not slot.errors
    assert received[0] == {"do": "wait"}


def test_a_silent_first_rank_is_noticed() -> None:
    slot = Slot(policy())
    group: Any = slot.peers[1].control_group
    group.set_timeout(timedelta(seconds=0.5))
    slot.peers[1].timeout_s = 0.5
    slot.follow()  # nothing drives rank 0
    slot.join()
    (error,) = slot.errors
    assert isinstance(error, PeerLost)
    assert "did not answer within 0.5 s" in str(error)


def test_commands_of_any_length_arrive_in_order() -> None:
    peers = peers_of(3)
    sent: list[list[Command]] = [[{"do": "a", "ids": list(range(n))}] for n in (0, 300, 3000, 1)]

    def work(rank: int) -> list[list[Command]]:
        if rank == 0:
            for commands in sent:
                peers[0].send(commands)
            return sent
        return [peers[rank].receive() for _ in sent]

    assert on_ranks(3, work) == [sent] * 3
    assert on_ranks(3, lambda rank: peers[rank].min_over_ranks(5 - rank)) == [3] * 3


def test_a_rank_that_fails_after_the_store_has_gone_raises_its_own_error() -> None:
    class GoneStore:
        def compare_set(self, *arguments: str) -> None:
            raise RuntimeError("the remote server has shut down")

    peers = Peers(1, 2, None, None, GoneStore(), 1.0)  # type: ignore[arg-type]
    error = ValueError("a token id past the vocabulary")
    assert peers.fail(error) is error


LONG = Sampling(60, 1.0, 0, ignore_eos=True)


def test_ranks_that_drew_different_tokens_stop() -> None:
    slot = Slot(policy())
    draw = slot.cores[1]._sample  # type: ignore[attr-defined]

    def wrong(logits: torch.Tensor) -> None:
        draw(logits.roll(1, -1))

    slot.cores[1]._sample = wrong  # type: ignore[attr-defined]
    slot.follow()
    with pytest.raises(RolloutError, match="sampled different tokens"):
        run_with_engine(slot.leader, slot.leader.generate([3, 4], LONG, "a"))
    slot.join()
