"""Counts finished groups over the ranks of one call, so that all ranks stop decoding at the same total."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

_CHECK_S = 0.02
"""The seconds between two checks of the total."""


class SharedCount:
    """A total over ranks in a store; no rank waits for another."""

    def __init__(self, store: dist.Store, key: str, target: int) -> None:
        """`key` is new, and the same on every rank."""
        self._store, self._key, self._target = store, key, target
        self._own_count = self._total = 0

    def is_reached(self, own_count: int) -> bool:
        """Reports this rank's count; returns whether the total has reached the target."""
        if own_count > self._own_count:
            self._add(own_count - self._own_count)
            self._own_count = own_count
        return self._total >= self._target

    @contextmanager
    def watched(self, on_reached: Callable[[], None]) -> Iterator[None]:
        """Calls `on_reached` during the block when the total reaches the target, in another thread."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(_CHECK_S):
                self._add(0)
                if self._total >= self._target:
                    on_reached()
                    return

        thread = threading.Thread(target=watch, name="hone-count", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _add(self, num_new: int) -> None:
        self._total = max(self._total, self._store.add(self._key, num_new))
