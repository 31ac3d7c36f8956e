"""Ctrl-C and SIGTERM: the first finishes the step and saves, the second stops at once.

A scheduler that preempts a job may send SIGTERM to every process of it at once. Ranks of a launcher
therefore count any number of signals as one request; their launcher ends them on a second one.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeAlias

from hone.types import Function

log = logging.getLogger(__name__)

Handler: TypeAlias = Function | int | None

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
_saved: list[Callable[[], str]] = []
"""The sentence about what the running program has saved."""
_launched: list[bool] = []
_programs: list[bool] = []
"""One entry while this process runs a program of the command line, and is not a user's own."""


def exit_code(number: int) -> int:
    """The code that a shell reports for a signal: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + number


def on_stop_say(sentence: Callable[[], str]) -> None:
    """Set what a stopped program says of what it has saved, and of how to resume."""
    _saved[:] = [sentence]


def stopped_line(how: str) -> str:
    """The last line of a stopped program."""
    saved = _saved[0]() if _saved else ""
    return f"{how}; {saved}\n" if saved else f"{how}\n"


def answer_to_launcher() -> None:
    """Mark this process as a rank: its launcher decides when it stops at once."""
    _launched[:] = [True]


def is_rank() -> bool:
    """Whether a launcher, ours or torchrun, started this process."""
    return bool(_launched) or "TORCHELASTIC_RUN_ID" in os.environ


def is_program() -> bool:
    """Whether this process runs a program of the command line, and is not a user's own."""
    return bool(_programs)


class Interrupted(SystemExit):
    """The user or the scheduler asked to stop; everything is saved."""

    def __init__(self, step: int, number: int = signal.SIGINT) -> None:
        super().__init__(exit_code(number))
        self.step = step


class StoppedAtOnce(SystemExit):
    """SIGTERM's KeyboardInterrupt."""


class GracefulStop:
    """While active, the first signal sets `requested`; the second stops the program at once."""

    def __init__(
        self, finishing: str = "stopping after this step; everything will be saved"
    ) -> None:
        self.number: int | None = None
        self._finishing = finishing
        self._before: dict[int, Handler] = {}

    @property
    def requested(self) -> bool:
        return self.number is not None

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._handle) for n in SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        _restore(self._before)

    def agree(self, sum_over_ranks: Callable[..., list[float]]) -> None:
        """Stop where any rank was asked to; every rank calls this."""
        own = (float(self.number == number) for number in SIGNALS)
        for number, ranks in zip(SIGNALS, sum_over_ranks(*own), strict=True):
            if ranks:
                self.number = number

    def raise_if_requested(self, step: int) -> None:
        if self.number is not None:
            raise Interrupted(step, self.number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = NAMES[signal.Signals(number)]
        if self.number is None:
            self.number = number
            if not is_rank():
                log.warning("%s (%s again stops at once)", self._finishing, name)
        elif not is_rank():
            if is_program():
                # Without clean-up: running code may catch an exception, and every file survives a kill.
                sys.stderr.write(stopped_line(f"stopped at once by {name}"))
                sys.stderr.flush()
                os._exit(exit_code(number))
            _stop_at_once(number)


@contextmanager
def stopping_at_once() -> Iterator[None]:
    """While there is nothing to save, the first signal ends the program through its clean-up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Handler] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        if is_rank():
            for other in SIGNALS:
                signal.signal(other, signal.SIG_IGN)  # the same request again, from the launcher
        _stop_at_once(number, again_is_default=not is_rank())

    try:
        before = {n: signal.signal(n, handle) for n in SIGNALS}
        _programs.append(True)
        _saved.clear()
        yield
    finally:
        _programs.pop()
        _restore(before)


def _stop_at_once(number: int, again_is_default: bool = True) -> None:
    if again_is_default:
        signal.signal(number, signal.SIG_DFL)  # a second signal does not wait for any clean-up
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise StoppedAtOnce(exit_code(number))


def _restore(handlers: dict[int, Handler]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)
