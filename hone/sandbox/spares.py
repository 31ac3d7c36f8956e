"""Builds one box before its order arrives, so that callers do not wait for mounts and namespaces.

A spare is used once, like any box, and holds no data until its order arrives. This file decides when to
build a spare, which order it fits, and when to discard it; box.py builds it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from hone.sandbox.box import Box
from hone.sandbox.plan import Order, Plan

KEEP_S = 1.0  # lifetime of an unused spare; runs further apart build none

Kind = tuple[Plan, int, bool]


class Spares:
    """Holds at most one spare, of the kind that was ordered twice in a row."""

    def __init__(
        self, build: Callable[[Order], Box], give_up: Callable[[Box], None], keep_s: float
    ) -> None:
        self._build, self._give_up, self._keep_s = build, give_up, keep_s
        self._box: Box | None = None
        self._last_kind: Kind | None = None
        self._last_time = -math.inf

    @property
    def pids(self) -> set[int]:
        return set() if self._box is None else {self._box.pid}

    @property
    def due(self) -> float:
        """The time at which the spare is discarded."""
        return math.inf if self._box is None else self._last_time + self._keep_s

    def take(self, order: Order) -> Box | None:
        """Returns the spare if it fits this order."""
        box = self._box
        if box is None or not box.ready or _kind(order) != _kind(box.order):
            return None
        self._box = None
        return box

    def restock(self, order: Order) -> None:
        """Build the next spare after an order was started, if a similar order is likely to follow."""
        kind, now = _kind(order), time.monotonic()
        is_likely = (
            kind is not None and kind == self._last_kind and now - self._last_time <= self._keep_s
        )
        self._last_kind, self._last_time = kind, now
        if not is_likely:
            return
        if self._box is not None and _kind(self._box.order) != kind:
            self.drop()
        if self._box is None:
            self._box = self._build(order)

    def check(self, now: float) -> None:
        """Discard a spare that is too old or dead."""
        if self._box is not None and (not self._box.ready or now >= self.due):
            self.drop()

    def drop(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            self._give_up(box)


def _kind(order: Order) -> Kind | None:
    """Returns what a spare must share with its order; None if the order has arguments or more files,
    which are fixed when a box is built."""
    plain = order.plan.bwrap is not None and not order.job.argv and not order.job.files
    return (order.plan, order.job.disk_mb, order.channel) if plain else None
