"""One box built ahead of its order, so that mounting and namespaces cost a waiting caller no time.

A spare is used once, like any box, and holds nothing until its order comes. Leaves out how a box is
built; knows only when a spare is worth building, which order it fits, and when to give it up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from hone.sandbox.box import Box
from hone.sandbox.plan import Order, Plan

KEEP_S = 1.0  # an unused spare is given up after this; runs further apart build none

Kind = tuple[Plan, int, bool]


class Spares:
    """At most one waiting box, of the kind that was ordered twice in a row."""

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
        """When the spare is given up."""
        return math.inf if self._box is None else self._last_time + self._keep_s

    def take(self, order: Order) -> Box | None:
        """The spare, if it can become this order's box."""
        box = self._box
        if box is None or not box.ready or _kind(order) != _kind(box.order):
            return None
        self._box = None
        return box

    def restock(self, order: Order) -> None:
        """Called after an order was started: build the next spare if another is likely to follow."""
        kind, now = _kind(order), time.monotonic()
        likely = (
            kind is not None and kind == self._last_kind and now - self._last_time <= self._keep_s
        )
        self._last_kind, self._last_time = kind, now
        if not likely:
            return
        if self._box is not None and _kind(self._box.order) != kind:
            self.drop()
        if self._box is None:
            self._box = self._build(order)

    def check(self, now: float) -> None:
        """Give up a spare that waited long enough, or that died."""
        if self._box is not None and (not self._box.ready or now >= self.due):
            self.drop()

    def drop(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            self._give_up(box)


def _kind(order: Order) -> Kind | None:
    """What a spare has in common with its order; None where arguments or further files are fixed
    when a box is built."""
    plain = order.plan.bwrap is not None and not order.job.argv and not order.job.files
    return (order.plan, order.job.disk_mb, order.channel) if plain else None
