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
"""What `signal.signal` takes and gives."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


def exit_code(number: int) -> int:
    """What a shell reports of a process that a signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + number


_kept: list[Callable[[], str]] = []
"""What the program at work would say of what it has saved."""
_launched: list[bool] = []
_programs: list[bool] = []
"""One entry while this process runs a program of the command line, and is not a user's own."""


def tell_kept(sentence: Callable[[], str]) -> None:
    """From here on a stopped program says this of what it has saved, and of how to go on."""
    _kept[:] = [sentence]


def stopped_line(how: str) -> str:
    """The last line of a stopped program."""
    kept = _kept[0]() if _kept else ""
    return f"{how}; {kept}\n" if kept else f"{how}\n"


def answer_to_launcher() -> None:
    """From here on this process is a rank: its launcher decides when it stops at once."""
    _launched[:] = [True]


def is_rank() -> bool:
    """Whether a launcher, ours or torchrun, started this process and answers for it."""
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
        asked = (float(self.number == number) for number in SIGNALS)
        for number, ranks in zip(SIGNALS, sum_over_ranks(*asked), strict=True):
            if ranks:
                self.number = number

    def raise_if_requested(self, step: int) -> None:
        if self.number is not None:
            raise Interrupted(step, self.number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number = number
            if not is_rank():
                again = NAMES[signal.Signals(number)]
                log.warning("%s (%s again stops at once)", self._finishing, again)
        elif not is_rank():
            if _programs:
                _end_process(number)
            _stop_at_once(number)


@contextmanager
def stopping_at_once() -> Iterator[None]:
    """While nothing is there to be saved, the first signal ends the program through its clean-up."""
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
        _kept.clear()
        yield
    finally:
        _programs.pop()
        _restore(before)


def _end_process(number: int) -> None:
    """Leave without clean-up: what runs now may catch an exception, and every file bears a kill."""
    sys.stderr.write(stopped_line(f"stopped at once by {NAMES[signal.Signals(number)]}"))
    sys.stderr.flush()
    os._exit(exit_code(number))


def _stop_at_once(number: int, again_is_default: bool = True) -> None:
    if again_is_default:
        signal.signal(number, signal.SIG_DFL)  # once more does not wait for any clean-up
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise StoppedAtOnce(exit_code(number))


def _restore(handlers: dict[int, Handler]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)
