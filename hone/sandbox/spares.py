"""Builds one box before its request arrives, so that callers do not wait for mounts and namespaces.

A spare is used once, like any box, and holds no data until its request arrives. This file decides
when to build a spare, which request it fits, and when to discard it; box.py builds it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from hone.sandbox.box import Box
from hone.sandbox.plan import BoxPlan, RunRequest

SPARE_LIFETIME_S = 1.0  # runs further apart than this build no spare

Kind = tuple[BoxPlan, int, bool]  # plan, disk_mb, has_channel


class SpareSlot:
    """Holds at most one spare, of the kind that was requested twice in a row."""

    def __init__(
        self,
        build_box: Callable[[RunRequest], Box],
        discard_box: Callable[[Box], None],
        lifetime_s: float,
    ) -> None:
        self._build_box, self._discard_box, self._lifetime_s = build_box, discard_box, lifetime_s
        self._box: Box | None = None
        self._last_kind: Kind | None = None
        self._last_time = -math.inf

    @property
    def pids(self) -> set[int]:
        return set() if self._box is None else {self._box.pid}

    @property
    def discard_time(self) -> float:
        """The time at which the spare is discarded."""
        return math.inf if self._box is None else self._last_time + self._lifetime_s

    def take(self, request: RunRequest) -> Box | None:
        """Removes and returns the spare if it fits this request, else returns None."""
        box = self._box
        if box is None or not box.is_live_spare or _kind(request) != _kind(box.request):
            return None
        self._box = None
        return box

    def restock(self, request: RunRequest) -> None:
        """Builds a spare if this request follows another of its kind within the lifetime."""
        kind, now = _kind(request), time.monotonic()
        is_repeated = (
            kind is not None
            and kind == self._last_kind
            and now - self._last_time <= self._lifetime_s
        )
        self._last_kind, self._last_time = kind, now
        if not is_repeated:
            return
        if self._box is not None and _kind(self._box.request) != kind:
            self.discard()
        if self._box is None:
            self._box = self._build_box(request)

    def check(self, now: float) -> None:
        """Discards a spare that is too old or dead."""
        if self._box is not None and (not self._box.is_live_spare or now >= self.discard_time):
            self.discard()

    def discard(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            self._discard_box(box)


def _kind(request: RunRequest) -> Kind | None:
    """Returns what must be equal for a spare and its request; None if no spare can fit the request."""
    # Arguments, and files other than the program, are fixed when a box is built.
    fits_spare = (
        request.plan.bwrap_path is not None and not request.job.argv and not request.job.files
    )
    return (request.plan, request.job.disk_mb, request.has_channel) if fits_spare else None
