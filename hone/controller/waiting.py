"""Progress of a wait for ranks, for a listener: how many processes have started or loaded their model.

Leaves out how it is shown: the controller knows no console.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[int, int], None]
"""Takes how many ranks have answered, and of how many."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have `listener` called about once per second of every wait inside."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)


def tell(answered: int, ranks: int) -> None:
    listener = _listener.get()
    if listener is not None:
        listener(answered, ranks)
