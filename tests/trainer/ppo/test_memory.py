"""What a run asks of Python's collector."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from hone.trainer.ppo.memory import freeze_garbage_collection


class Ring:
    """Held by itself alone."""

    def __init__(self) -> None:
        self.itself = self


def test_on_a_gpu_the_collector_is_spared_after_what_nobody_holds_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    reference = weakref.ref(Ring())
    with freeze_garbage_collection() as freeze:
        assert reference() is None
        count = gc.get_freeze_count()
        assert count > 1000
        imported = [[] for _ in range(5000)]
        reference = weakref.ref(Ring())
        freeze()
        assert reference() is None
        assert gc.get_freeze_count() >= count + len(imported)
    assert gc.get_freeze_count() == 0


def test_what_the_interpreter_itself_froze_is_not_taken_for_the_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with monkeypatch.context() as at_the_start:
        at_the_start.setattr(gc, "get_freeze_count", lambda: 375)  # Python 3.12.1
        context = freeze_garbage_collection()
        context.__enter__()
    assert gc.get_freeze_count() > 1000
    context.__exit__(None, None, None)
    assert gc.get_freeze_count() == 0


def test_what_the_caller_froze_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gc.freeze()
    try:
        with freeze_garbage_collection():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_without_a_gpu_it_is_left_alone() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    count = gc.get_freeze_count()
    with freeze_garbage_collection() as freeze:
        freeze()
        assert gc.get_freeze_count() == count
