"""Handles Ctrl-C and SIGTERM: a run saves and stops after the first signal, and exits on the second.

A scheduler that preempts a job may send SIGTERM to all of its processes at once. Ranks therefore treat any
number of signals as one request; their launcher kills them when it receives a second signal.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TypeAlias

log = logging.getLogger(__name__)

SignalHandler: TypeAlias = Callable[[int, FrameType | None], None]
SIGNAL_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


@dataclass
class _ProcessState:
    """How this process was started, and what it prints when it stops."""

    describe_saved: Callable[[], str] | None = None
    """Returns a sentence about the saved state, which a stopped program prints."""
    was_launched: bool = False
    """Whether `launch` started this process."""
    num_programs: int = 0
    """The number of command-line programs that run in this process; 0 in a user's Python program."""


_process = _ProcessState()


def signal_exit_code(signal_number: int) -> int:
    """Returns the code that a shell reports for a signal: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + signal_number


def set_stop_message(describe_saved: Callable[[], str]) -> None:
    """Sets the function that returns the last sentence of a stopped program: what is saved, how to resume."""
    _process.describe_saved = describe_saved


def stop_message(reason: str) -> str:
    """Returns the last line that a stopped program prints."""
    saved_sentence = _process.describe_saved() if _process.describe_saved else ""
    return f"{reason}; {saved_sentence}\n" if saved_sentence else f"{reason}\n"


def mark_as_rank() -> None:
    """Marks this process as a rank, which its launcher kills on a second signal."""
    _process.was_launched = True


def is_rank() -> bool:
    """Returns whether `launch` or torchrun started this process."""
    return _process.was_launched or "TORCHELASTIC_RUN_ID" in os.environ


def runs_command_line_program() -> bool:
    """Returns whether this process runs a command-line program, and not a user's Python program."""
    return _process.num_programs > 0


@contextmanager
def signal_handler(handle: SignalHandler) -> Iterator[None]:
    """Handles Ctrl-C and SIGTERM with `handle` inside the block, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handlers = {number: signal.signal(number, handle) for number in SIGNAL_NAMES}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class Interrupted(SystemExit):
    """Raised after saving, when the user or the scheduler requested a stop."""

    def __init__(self, step: int, signal_number: int = signal.SIGINT) -> None:
        super().__init__(signal_exit_code(signal_number))
        self.step = step


class Terminated(SystemExit):
    """Raised on SIGTERM, as KeyboardInterrupt is on SIGINT."""


class GracefulStop:
    """Inside its block, the first signal sets `is_requested`, and the second stops the program at once."""

    def __init__(
        self, stop_notice: str = "stopping after this step; everything will be saved"
    ) -> None:
        self.signal_number: int | None = None
        self._stop_notice = stop_notice
        self._stack = ExitStack()

    @property
    def is_requested(self) -> bool:
        return self.signal_number is not None

    def __enter__(self) -> GracefulStop:
        self._stack.enter_context(signal_handler(self._handle))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def sync_ranks(self, sum_over_ranks: Callable[..., list[float]]) -> None:
        """Requests a stop on every rank if any rank received a signal; all ranks must call this method."""
        has_received = (float(self.signal_number == number) for number in SIGNAL_NAMES)
        for number, num_ranks in zip(SIGNAL_NAMES, sum_over_ranks(*has_received), strict=True):
            if num_ranks:
                self.signal_number = number

    def raise_if_requested(self, step: int) -> None:
        if self.signal_number is not None:
            raise Interrupted(step, self.signal_number)

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        """Requests a stop on the first signal; on the second, exits at once unless this is a rank."""
        name = SIGNAL_NAMES[signal.Signals(signal_number)]
        if self.signal_number is None:
            self.signal_number = signal_number
            if not is_rank():
                log.warning("%s (%s again stops at once)", self._stop_notice, name)
        elif not is_rank():
            if runs_command_line_program():
                # User code could catch an exception, but not os._exit. Files are written atomically.
                sys.stderr.write(stop_message(f"stopped at once by {name}"))
                sys.stderr.flush()
                os._exit(signal_exit_code(signal_number))
            _raise_exit(signal_number)


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """Exits on the first signal, with clean-up; a `GracefulStop` inside the block replaces this handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(signal_number: int, frame: FrameType | None) -> None:
        if is_rank():
            for number in SIGNAL_NAMES:
                # The launcher may forward the signal that this rank has already received.
                signal.signal(number, signal.SIG_IGN)
        _raise_exit(signal_number, restore_default=not is_rank())

    _process.num_programs += 1
    try:
        with signal_handler(handle):
            _process.describe_saved = None
            yield
    finally:
        _process.num_programs -= 1


def _raise_exit(signal_number: int, restore_default: bool = True) -> None:
    """Raises KeyboardInterrupt for SIGINT, and Terminated for SIGTERM."""
    if restore_default:
        signal.signal(signal_number, signal.SIG_DFL)  # a second signal exits without clean-up
    if signal_number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(signal_exit_code(signal_number))
