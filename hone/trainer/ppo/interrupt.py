"""Ctrl-C with manners: the first finishes the step and saves, the second stops at once."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

EXIT_CODE = 130


class Interrupted(SystemExit):
    """The user asked to stop; everything is saved."""

    def __init__(self, step: int) -> None:
        super().__init__(EXIT_CODE)
        self.step = step


class GracefulStop:
    """While active, the first interrupt sets `requested`; the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False
        self._before: Any = None

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def raise_if_requested(self, step: int) -> None:
        if self.requested:
            raise Interrupted(step)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        log.warning(
            "stopping after this step; everything will be saved (Ctrl-C again stops at once)"
        )
