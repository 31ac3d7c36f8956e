"""Renders chat templates, which are code of a model folder, within time, memory and text limits.

A template is first tried in a subprocess. Then it is rendered here, where a watcher thread interrupts
a call that exceeds its CPU time.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hone.data import template_trial
from hone.text import clean_values
from hone.tokenizer import Tokenizer
from hone.types import Settings

logger = logging.getLogger(__name__)
T = TypeVar("T")

RENDER_S = 10.0
"""CPU seconds per rendering."""
TRIAL_BYTES = 1 << 31
MAX_CHARACTERS = 1 << 26
"""Maximum characters per rendering."""
_TRIAL_WAIT_S = 120.0
"""Wall-clock limit of a trial: it takes a tenth of a second, but the machine may be busy."""
_INTERVAL_S = 0.25
_ARRIVAL_S = 0.1
"""Seconds to wait for a sent interrupt, which arrives with the next line of Python."""

_trial_lock = threading.Lock()
_verdicts: dict[str, str | None] = {}
"""Template -> its fault or None, for the templates tried in this process."""


class BrokenTemplate(ValueError):
    """Raised for a chat template that does not terminate or exceeds a limit; it can render no row."""


def _broken(tokenizer: Tokenizer, what: str) -> BrokenTemplate:
    name = getattr(tokenizer, "name_or_path", None) or "the tokenizer"
    return BrokenTemplate(
        f"the chat template of {name} {what}; repair it, or give another one "
        "(actor_rollout_ref.model.custom_chat_template; data.chat_template in hone sft)"
    )


def apply_template(
    messages: Sequence[Settings],
    tokenizer: Tokenizer,
    *,
    tools: Sequence[Settings] | None = None,
    tokenize: bool,
    **options: Any,
) -> str | list[int]:
    """Calls `tokenizer.apply_chat_template` within the limits; returns text, or ids if `tokenize` is true."""
    template = _template_of(tokenizer, tools, options)
    if template is not None:
        with _trial_lock:
            if template not in _verdicts:
                special = getattr(tokenizer, "special_tokens_map", {})
                variables = {**special, **options, "messages": messages, "tools": tools}
                _verdicts[template] = _try_template(template, variables)
        if (fault := _verdicts[template]) is not None:
            raise _broken(tokenizer, fault)

    def render() -> str | list[int]:
        return tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            tokenize=tokenize,
            return_dict=False,
            **options,
        )

    try:
        rendered = run_limited(render, RENDER_S)
    except Overdue:
        raise _broken(tokenizer, _no_end()) from None
    if isinstance(rendered, str) and len(rendered) > MAX_CHARACTERS:
        raise _broken(tokenizer, _too_large())
    return rendered


def _no_end() -> str:
    return f"does not end within {RENDER_S:g} s of computing"


def _too_large() -> str:
    return (
        f"writes more than {MAX_CHARACTERS:,} characters, or needs more than "
        f"{TRIAL_BYTES >> 20:,} MiB of memory"
    )


def _template_of(
    tokenizer: Tokenizer, tools: Sequence[Settings] | None, options: Settings
) -> str | None:
    if not hasattr(tokenizer, "get_chat_template"):
        return None
    try:
        template = tokenizer.get_chat_template(options.get("chat_template"), tools)
    except (ValueError, TypeError):  # the rendering raises the error
        return None
    return template if isinstance(template, str) else None


def _try_template(template: str, variables: Settings) -> str | None:
    """Tries a template in a subprocess and returns its fault or None."""
    task = {
        "path": sys.path,
        "template": template,
        "variables": clean_values(variables),
        "seconds": RENDER_S,
        "bytes": TRIAL_BYTES,
        "characters": MAX_CHARACTERS,
    }
    try:
        status = subprocess.run(
            [sys.executable, "-I", str(Path(template_trial.__file__))],
            input=json.dumps(task).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TRIAL_WAIT_S,
            check=False,
        ).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("the chat template could not be tried beforehand: %s", error)
        return None
    if status == -signal.SIGPROF:
        return _no_end()
    if status == template_trial.TOO_LARGE:
        return _too_large()
    return f"crashes its interpreter (signal {-status})" if status < 0 else None


class Overdue(Exception):
    """Raised when a call exceeds its CPU time."""


class _Interrupt(BaseException):
    """Raised in the thread of an overdue call; a BaseException, so that the call does not catch it."""


def run_limited(call: Callable[[], T], seconds: float) -> T:
    """Returns the result of the call; raises Overdue after `seconds` of CPU time."""
    thread = threading.get_ident()
    has_arrived = False
    try:
        _watch.begin(thread, seconds)
        return call()
    except _Interrupt:
        has_arrived = True
        raise Overdue(f"not done after {seconds:g} s") from None
    finally:
        _let_arrive(thread, has_arrived)


def _let_arrive(thread: int, has_arrived: bool) -> None:
    """Ends the watch and receives a sent interrupt here, because Python cannot withdraw it."""
    was_sent = has_arrived
    while True:
        try:
            was_sent = _watch.end(thread) or was_sent
            until = time.monotonic() + _ARRIVAL_S
            while was_sent and not has_arrived and time.monotonic() < until:
                pass
            return
        except _Interrupt:
            has_arrived = True


class _Watch:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[int, float] = {}
        self._sent: set[int] = set()
        self._busy = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, thread: int, seconds: float) -> None:
        with self._lock:
            self._ends[thread] = _computing_s(thread) + seconds
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hone-watch", daemon=True)
                self._thread.start()
        self._busy.set()

    def end(self, thread: int) -> bool:
        """Stops interrupts to a thread; returns whether one was sent."""
        with self._lock:
            self._ends.pop(thread, None)
            was_sent = thread in self._sent
            self._sent.discard(thread)
        return was_sent

    def _run(self) -> None:
        interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc
        while True:
            self._busy.wait()
            time.sleep(_INTERVAL_S)
            with self._lock:
                for thread, end in self._ends.items():
                    if _computing_s(thread) > end:
                        interrupt(ctypes.c_ulong(thread), ctypes.py_object(_Interrupt))
                        self._sent.add(thread)
                if not self._ends:
                    self._busy.clear()


def _computing_s(thread: int) -> float:
    """Returns the CPU seconds of a thread, or wall-clock time if the system does not count them."""
    if hasattr(time, "pthread_getcpuclockid"):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return time.monotonic()


_watch = _Watch()


def _after_fork() -> None:
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_after_fork)
