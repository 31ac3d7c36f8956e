"""Renders chat templates, which are third-party code, within limits on time, memory and text.

A new template is rendered once in a subprocess. Later renderings run in this process, where a
watcher thread interrupts a call that exceeds its CPU time.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from hone.data import template_trial
from hone.data.messages import Prompt, PromptError, Tools, as_messages
from hone.errors import UserError
from hone.text import clean_values, error_text, short_repr
from hone.tokenizer import Tokenizer
from hone.types import Settings

logger = logging.getLogger(__name__)
T = TypeVar("T")

TOKENIZER_OPTIONS = {"tokenizer_kwargs", "sanitize_control_tokens", "padding", "truncation"}
"""Template options that affect tokenization; they make `render_chat` return ids."""
RENDER_CPU_S = 10.0  # CPU seconds per rendering
TRIAL_MEMORY_BYTES = 1 << 31  # memory limit of the subprocess
MAX_CHARACTERS = 1 << 26  # maximum characters per rendering
TEMPLATE_DATE = datetime(2024, 7, 26)
"""Today's date for every template: a run that is resumed on another day renders the same prompts."""
_TRIAL_TIMEOUT_S = 120.0  # wall-clock limit of the subprocess, which usually takes 0.1 s
_POLL_INTERVAL_S = 0.25
_INTERRUPT_WAIT_S = 0.1
"""Longest wait until Python raises an interrupt, which it does at the next line."""

_trial_lock = threading.Lock()
_template_faults: dict[str, str | None] = {}
"""Fault of each template that this process has rendered; None for a template without a fault."""


class BrokenTemplate(UserError, ValueError):
    """Raised for a chat template that does not terminate or exceeds a limit, whatever the row."""


def _broken_template(tokenizer: Tokenizer, fault: str) -> BrokenTemplate:
    name = getattr(tokenizer, "name_or_path", None) or "the tokenizer"
    return BrokenTemplate(
        f"the chat template of {name} {fault}; repair it, or set another one "
        "(actor_rollout_ref.model.custom_chat_template; data.chat_template in hone sft)"
    )


def render_chat(
    raw_prompt: Prompt,
    tokenizer: Tokenizer,
    tools: Tools | None = None,
    template_kwargs: Settings | None = None,
) -> str | list[int]:
    """Renders messages and the generation prompt to text, or to ids if the tokenizer returns no text.

    Without a chat template, a plain string is returned unchanged.
    """
    options = {"add_generation_prompt": True, **(template_kwargs or {})}
    if not getattr(tokenizer, "chat_template", None) and "chat_template" not in options:
        if isinstance(raw_prompt, str) and not tools:
            return raw_prompt
        raise PromptError(
            "the tokenizer has no chat template, so messages and tools cannot be rendered; use"
            " data.prompt_format=raw with prompts that contain the whole text, or a tokenizer that"
            " has a chat template"
        )
    messages = as_messages(raw_prompt)
    for number, message in enumerate(messages):
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part.get("type", "text") != "text":  # the template would drop an image
                raise PromptError(
                    f"message {number} has a part of type {short_repr(part['type'])}; give text only"
                )
    if options.get("continue_final_message"):
        options["add_generation_prompt"] = False
    is_custom = not hasattr(tokenizer, "get_chat_template")  # for example, mistral-common
    tokenize = is_custom or bool(TOKENIZER_OPTIONS & options.keys())
    try:
        rendering = apply_template(messages, tokenizer, tools=tools, tokenize=tokenize, **options)
    except BrokenTemplate:
        raise
    except Exception as error:  # a template is third-party code
        raise PromptError(
            f"the tokenizer's chat template cannot render {short_repr(messages)}: {error_text(error)}"
        ) from error
    return rendering if isinstance(rendering, str) else [int(token) for token in rendering]


def apply_template(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tokenize: bool,
    **options: Any,
) -> str | list[int]:
    """Calls `tokenizer.apply_chat_template` within the limits."""
    template = None
    if hasattr(tokenizer, "get_chat_template"):
        # `render` below raises the same error.
        with contextlib.suppress(ValueError, TypeError):
            template = tokenizer.get_chat_template(options.get("chat_template"), tools)
    if isinstance(template, str):
        with _trial_lock:
            if template not in _template_faults:
                special_tokens = getattr(tokenizer, "special_tokens_map", {})
                variables = {**special_tokens, **options, "messages": messages, "tools": tools}
                _template_faults[template] = _find_fault(template, variables)
        fault = _template_faults[template]
        if fault is not None:
            raise _broken_template(tokenizer, fault)

    def render() -> str | list[int]:
        if isinstance(template, str):
            _fix_clock_and_randomness(template)
        return tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            tokenize=tokenize,
            return_dict=False,
            **options,
        )

    try:
        rendering = run_limited(render, RENDER_CPU_S)
    except CpuTimeExceeded:
        raise _broken_template(tokenizer, _timeout_fault()) from None
    if isinstance(rendering, str) and len(rendering) > MAX_CHARACTERS:
        raise _broken_template(tokenizer, _size_fault())
    return rendering


def _fix_clock_and_randomness(template: str) -> None:
    """Makes renderings of a template the same in every start of a run.

    `transformers` keeps the compiled templates; their environment has the functions that they call.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(template).environment
    environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
    environment.globals["lipsum"] = environment.filters["random"] = _refuse_randomness


def _refuse_randomness(*values: object, **options: object) -> str:
    raise ValueError("it uses `random` or `lipsum`, and prompts must be the same in every start")


def _timeout_fault() -> str:
    return f"does not end within {RENDER_CPU_S:g} s of CPU time"


def _size_fault() -> str:
    return (
        f"writes more than {MAX_CHARACTERS:,} characters, or needs more than "
        f"{TRIAL_MEMORY_BYTES >> 20:,} MiB of memory"
    )


def _find_fault(template: str, variables: Mapping[str, Any]) -> str | None:
    """Renders a template in a subprocess and returns its fault or None."""
    task = {
        "path": sys.path,
        "template": template,
        "variables": clean_values(variables),
        "seconds": RENDER_CPU_S,
        "bytes": TRIAL_MEMORY_BYTES,
        "characters": MAX_CHARACTERS,
    }
    try:
        status = subprocess.run(
            [sys.executable, "-I", str(Path(template_trial.__file__))],
            input=json.dumps(task).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TRIAL_TIMEOUT_S,
            check=False,
        ).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("the chat template could not be tested in a subprocess: %s", error)
        return None
    if status == -signal.SIGPROF:
        return _timeout_fault()
    if status == template_trial.TOO_LARGE:
        return _size_fault()
    if -status in (signal.SIGINT, signal.SIGTERM):  # a signal to all processes of this program
        return None
    return f"crashes Python (signal {-status})" if status < 0 else None


class CpuTimeExceeded(Exception):
    """Raised when a call exceeds its CPU time."""


class _Interrupt(BaseException):
    """Interrupts a call; a BaseException, so that the call does not catch it."""


def run_limited(call: Callable[[], T], cpu_limit_s: float) -> T:
    """Returns the result of `call()`; raises CpuTimeExceeded beyond `cpu_limit_s` of CPU time."""
    thread = threading.get_ident()
    is_interrupt_raised = False
    try:
        _watcher.watch(thread, cpu_limit_s)
        return call()
    except _Interrupt:
        is_interrupt_raised = True
        raise CpuTimeExceeded(f"not done after {cpu_limit_s:g} s of CPU time") from None
    finally:
        is_watched = True
        while is_watched:
            try:  # Python may raise an interrupt before the first line of the function
                _stop_watching(thread, is_interrupt_raised)
                is_watched = False
            except _Interrupt:
                is_interrupt_raised = True


def _stop_watching(thread: int, is_interrupt_raised: bool) -> None:
    """Stops watching a thread, and waits until an interrupt that was sent has been raised.

    Python cannot withdraw an interrupt; without the wait, Python would raise it in later code.
    """
    is_interrupt_sent = is_interrupt_raised
    while True:
        try:
            is_interrupt_sent = _watcher.unwatch(thread) or is_interrupt_sent
            deadline = time.monotonic() + _INTERRUPT_WAIT_S
            while is_interrupt_sent and not is_interrupt_raised and time.monotonic() < deadline:
                pass  # Python raises an interrupt between two instructions, not during a sleep
            return
        except _Interrupt:
            is_interrupt_raised = True


class _CpuWatcher:
    """Interrupts the watched threads that exceed their CPU time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cpu_deadlines: dict[int, float] = {}
        self._interrupted_threads: set[int] = set()
        self._has_calls = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, thread: int, cpu_limit_s: float) -> None:
        """Interrupts a thread once it has used `cpu_limit_s` more seconds of CPU time."""
        with self._lock:
            self._cpu_deadlines[thread] = _cpu_seconds(thread) + cpu_limit_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hone-watch", daemon=True)
                self._thread.start()
        self._has_calls.set()

    def unwatch(self, thread: int) -> bool:
        """Stops watching a thread; returns whether an interrupt was sent to it."""
        with self._lock:
            self._cpu_deadlines.pop(thread, None)
            is_interrupt_sent = thread in self._interrupted_threads
            self._interrupted_threads.discard(thread)
        return is_interrupt_sent

    def _run(self) -> None:
        interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc
        while True:
            self._has_calls.wait()
            time.sleep(_POLL_INTERVAL_S)
            with self._lock:
                for thread, deadline in self._cpu_deadlines.items():
                    if _cpu_seconds(thread) > deadline:
                        interrupt(ctypes.c_ulong(thread), ctypes.py_object(_Interrupt))
                        self._interrupted_threads.add(thread)
                if not self._cpu_deadlines:
                    self._has_calls.clear()


def _cpu_seconds(thread: int) -> float:
    """Returns the CPU time of a thread, or wall-clock time if the system has no CPU clock."""
    if hasattr(time, "pthread_getcpuclockid"):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return time.monotonic()


_watcher = _CpuWatcher()


def _replace_watcher() -> None:
    global _watcher
    _watcher = _CpuWatcher()


os.register_at_fork(after_in_child=_replace_watcher)
