"""One box built ahead of its order, so that mounting and namespaces cost a waiting caller no time.

A spare is used once, like any box, and holds nothing until its order comes. Leaves out how a box is
built; knows only when a spare is worth building, which order it fits, and when to give it up.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hone.sandbox.box import Box
from hone.sandbox.plan import Order, Plan

KEEP_S = 1.0  # an unused spare is given up after this; runs further apart build none

Kind = tuple[Plan, int, bool]
Build = Callable[[Order], Box]


class Spares:
    """At most one waiting box, of the kind that was asked for twice in a row."""

    def __init__(self, build: Build, give_up: Callable[[Box], None], keep_s: float) -> None:
        self._build = build
        self._give_up = give_up
        self._keep_s = keep_s
        self._box: Box | None = None
        self._last: tuple[Kind, float] | None = None

    @property
    def pids(self) -> set[int]:
        return set() if self._box is None else {self._box.pid}

    @property
    def due(self) -> float | None:
        """When the spare is given up."""
        return None if self._box is None or self._last is None else self._last[1] + self._keep_s

    def take(self, order: Order) -> Box | None:
        """The spare, if it can become this order's box."""
        box = self._box
        if box is None or not box.ready or not _plain(order) or _kind(order) != _kind(box.order):
            return None
        self._box = None
        return box

    def restock(self, order: Order) -> None:
        """Called after an order was started: build the next spare if another is likely to follow."""
        kind, now = _kind(order), time.monotonic()
        last_kind, last_time = self._last or (None, 0.0)
        self._last = (kind, now)
        if kind != last_kind or now - last_time > self._keep_s or not _plain(order):
            return
        if self._box is not None and _kind(self._box.order) != kind:
            self.drop()
        if self._box is None:
            self._box = self._build(order)

    def check(self, now: float) -> None:
        """Give up a spare that waited long enough, or that died."""
        due = self.due
        if self._box is not None and (not self._box.ready or (due is not None and now >= due)):
            self.drop()

    def drop(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            self._give_up(box)


def _kind(order: Order) -> Kind:
    return order.plan, order.disk_mb, order.channel


def _plain(order: Order) -> bool:
    """Nothing but a program: arguments and further files are fixed when a box is built."""
    return order.plan.bwrap is not None and not order.argv and len(order.files) == 1
