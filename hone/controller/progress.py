"""Tells a listener how many ranks have answered, while a caller waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[int, int], None]
"""Receives the number of ranks that have answered and the number of all ranks."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def on_wait_progress(listener: Listener) -> Iterator[None]:
    """Calls `listener` about once per second while the caller waits for ranks inside the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report_progress(answered_ranks: int, total_ranks: int) -> None:
    """Calls the listener, if there is one."""
    listener = _listener.get()
    if listener is not None:
        listener(answered_ranks, total_ranks)
