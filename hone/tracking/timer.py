"""Times the phases of a step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, MutableMapping

TIMING_PREFIX = "timing_s/"


@contextlib.contextmanager
def simple_timer(name: str, timing_raw: MutableMapping[str, float]) -> Iterator[None]:
    """Adds the elapsed seconds of the block to `timing_raw[name]`, even if the block raises."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start
