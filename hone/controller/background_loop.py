"""An event loop in a background thread, for the coroutine methods of a worker."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from typing import TypeVar

logger = logging.getLogger(__name__)

STOP_DEADLINE_S = 5.0
T = TypeVar("T")


class BackgroundLoop:
    """Runs all coroutines in one event loop: a coroutine may leave tasks that a later coroutine awaits."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[None, None, T]) -> T:
        """Waits for the result of the coroutine; the first call starts the event loop."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="worker-event-loop", daemon=True
            )
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """Stops the event loop, if it was started, and closes it unless a task blocks it."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=STOP_DEADLINE_S)
        if self._thread.is_alive():
            logger.warning("the event loop of a worker is still busy; it was not closed")
        else:
            self._loop.close()
        self._loop = self._thread = None
