"""Whether a process is stopped, and for how long something has been silent.

A process that works, however long, is never called silent; one that was stopped (SIGSTOP) is. Leaves
out processes of other machines: a probe on their node looks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

STOPPED, ZOMBIE, GONE = "T", "Z", ""
LONGEST_GAP_S = 5.0


def process_state(pid: int) -> str:
    """The state letter the kernel gives a process of this machine; empty where there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return GONE


class Target(NamedTuple):
    """What may be silent: a worker's process, a part of Ray, a node, or the control plane."""

    kind: Literal["seat", "own", "node", "ping"]
    name: str = ""
    """Of the node, or of the part of Ray."""
    number: int = 0
    """The process id of a seat, else how often it was heard: what was heard again is another target."""


class Silence:
    """Seconds for which each target was silent, counted while the caller looks.

    A caller that did not look for a while, because it was busy or stopped itself, has seen nothing:
    at most LONGEST_GAP_S count between two looks.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._seconds: dict[Target, float] = {}
        self._looked_at: float | None = None

    def look(self, silent: Iterable[Target], now: float) -> list[Target]:
        """Take note of who is silent now; those who have been for the whole limit."""
        passed = 0.0 if self._looked_at is None else min(now - self._looked_at, LONGEST_GAP_S)
        self._looked_at = now
        self._seconds = {
            target: self._seconds[target] + passed if target in self._seconds else 0.0
            for target in silent
        }
        return [target for target, seconds in self._seconds.items() if seconds >= self.limit_s]
