"""The number of threads of a process: where it comes from, and that a worker group fixes it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from toy_workers import Toy

from hone.config import ConfigError
from hone.controller import ClassWithInitArgs, LocalWorkerGroup
from hone.controller.threads import set_thread_count, slowdown, thread_count


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("text", "count"), [("5", 5), ("4,2", 4)])
def test_the_environment_decides_before_the_cores(
    text: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert thread_count(8) == count


@pytest.mark.parametrize("text", ["many", "0", "-2", "1.5"])
def test_a_number_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    with pytest.raises(ConfigError, match=f"OMP_NUM_THREADS='{text}': give a whole number"):
        thread_count()


def test_ranks_of_a_node_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert [thread_count(ranks) for ranks in (1, 2, 16)] == [8, 4, 1]


@pytest.mark.parametrize("given", [None, 3])
def test_a_group_fixes_the_count(given: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    set_thread_count(1)
    with LocalWorkerGroup(None, ClassWithInitArgs(Toy, 1.0), threads=given) as group:
        assert group.whereabouts()[0]["threads"] == (given or 2)


def test_measuring_leaves_the_count_as_it_was() -> None:
    set_thread_count(1)
    assert slowdown(2) > 0
    assert torch.get_num_threads() == 1
