"""Ranks that count what has finished stop at one total, and none waits for another."""

from __future__ import annotations

import threading

import torch.distributed as dist

from hone.workers.shared_count import SharedCount


def test_ranks_stop_at_the_total_of_all() -> None:
    store = dist.HashStore()
    first, second, idle = (SharedCount(store, "first", 3) for _ in range(3))
    assert not first.is_reached(2)
    assert not second.is_reached(0)
    assert second.is_reached(1)
    reached = threading.Event()
    with first.watched(lambda: None), idle.watched(reached.set):
        assert reached.wait(60)
    assert idle.is_reached(0)


def test_another_call_counts_anew() -> None:
    store = dist.HashStore()
    assert SharedCount(store, "first", 1).is_reached(1)
    second = SharedCount(store, "second", 1)
    reached = threading.Event()
    with second.watched(reached.set):
        assert not reached.wait(0.1)
    assert not second.is_reached(0)
