"""Calls a plain or async scorer with the arguments that it accepts, until a deadline.

Built-in, user-defined and registered scorers have different signatures; only this file knows them.
Callers of this file catch the scorer's exceptions and check the result.

The deadline is soft, because Python cannot kill a running function. In the main thread, a timer
signal interrupts the call. In other threads, the call runs in a helper thread, which is abandoned at
the deadline. The prime manager's processes have a hard deadline.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

from hone.event_loop import run_coroutine
from hone.rewards.failures import SetupError
from hone.types import Fields, Function, Settings

T = TypeVar("T")

ROW_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""The arguments of the batch manager: lists with one item per response."""
FORMAT_ARGUMENTS = (
    "format_score",
    "structure_format_score",
    "final_format_score",
    "retrieval_score",
)
"""Format rewards: config keys under `reward_model` that only some scorers accept."""
_SERVICE_ARGUMENTS = (
    "sandbox_fusion_url",
    "concurrent_semaphore",
    "memory_limit_mb",
    "reward_router_address",
    "reward_model_tokenizer",
)
OPTIONAL_ARGUMENTS = frozenset({*FORMAT_ARGUMENTS, *_SERVICE_ARGUMENTS, "score_observations"})
"""Arguments that a scorer gets if it accepts them; other scorers are called without them."""

_PACKAGE_FOLDER = str(Path(__file__).parents[1])
_LIBRARY_FOLDERS = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})

_mishaps: ContextVar[dict[str, int] | None] = ContextVar("mishaps", default=None)


class counted_mishaps:
    """Counts, by reason, the problems in a `with` block that do not stop a scorer; outer blocks add them."""

    def __enter__(self) -> dict[str, int]:
        self._outer_counts, self._counts = _mishaps.get(), dict[str, int]()
        _mishaps.set(self._counts)
        return self._counts

    def __exit__(self, *_: object) -> None:
        _mishaps.set(self._outer_counts)
        for reason, count in self._counts.items():
            count_mishap(reason, count)


def count_mishap(reason: str, count: int = 1) -> None:
    """Counts a problem that did not stop a scorer, such as a timeout of a symbolic comparison."""
    counts = _mishaps.get()
    if counts is not None:
        counts[reason] = counts.get(reason, 0) + count


class ScorerSignatureError(SetupError, TypeError):
    """A scorer's signature does not fit the arguments that the manager passes."""


def is_async(function: Function) -> bool:
    """Returns whether a call of the function or object returns a coroutine."""
    unwrapped = unwrap_function(function)
    call = getattr(type(unwrapped), "__call__", None)  # noqa: B004
    return any(map(inspect.iscoroutinefunction, (function, unwrapped, call)))


def accepted_names(function: Function) -> frozenset[str] | None:
    """Returns the accepted keyword names; None if all are accepted or there is no signature."""
    try:
        return _accepted_names(function)
    except TypeError:  # an object that is not hashable cannot be cached
        return _accepted_names.__wrapped__(function)


@lru_cache(maxsize=1024)
def _accepted_names(function: Function) -> frozenset[str] | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    keyword_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in parameters if p.kind in keyword_kinds)


def init_parameter_names(cls: type) -> frozenset[str]:
    """Returns the parameter names of `__init__` in a class and its bases."""
    names: set[str] = set()
    for ancestor in cls.__mro__:
        if "__init__" in vars(ancestor) and ancestor is not object:
            names.update(inspect.signature(vars(ancestor)["__init__"]).parameters)
    return frozenset(names - {"self", "args", "kwargs", "options"})


def call_scorer(function: Function, arguments: Settings, options: Settings) -> Any:
    """Calls a scorer with the arguments that it accepts; a coroutine is run to its result."""
    result = function(**accepted_arguments(function, arguments, options))
    return run_coroutine(result) if inspect.iscoroutine(result) else result


async def await_scorer(function: Function, arguments: Settings) -> Any:
    """Calls a scorer and awaits its result if it is a coroutine.

    A synchronous function is called in a thread, because it may block, or run an event loop of its own.
    """
    call = function
    while isinstance(call, partial):
        call = call.func
    methods = call, getattr(type(call), "__call__", None)  # noqa: B004
    if any(map(inspect.iscoroutinefunction, methods)):
        return await function(**arguments)
    result = await asyncio.to_thread(function, **arguments)
    return await result if inspect.isawaitable(result) else result


def accepted_arguments(function: Function, arguments: Settings, options: Settings) -> Fields:
    """Returns the arguments and options that the scorer accepts; an unknown option is an error."""
    names = accepted_names(function)
    if names is None:
        return {**arguments, **options}
    for name in options:
        if name not in names and name not in OPTIONAL_ARGUMENTS:
            raise ScorerSignatureError(
                f"scorer {describe(function)} takes no argument {name!r}; it takes "
                f"{', '.join(sorted(names - set(ROW_ARGUMENTS))) or 'none'}. Check "
                "reward_model.reward_kwargs and custom_reward_function.reward_kwargs."
            )
    return {name: value for name, value in {**arguments, **options}.items() if name in names}


def check_signature(function: Function, arguments: Sequence[str], options: Settings) -> None:
    """Raises ScorerSignatureError if the scorer cannot be called with these arguments."""
    if not callable(function):
        raise ScorerSignatureError(
            f"the score function is {function!r:.80}, which cannot be called; "
            "name a function with custom_reward_function.name"
        )
    location = definition_location(function) or describe(function)
    if isinstance(function, partial):  # custom_reward_function.reward_kwargs are bound
        names = accepted_names(function.func)
        unknown_names = [] if names is None else sorted(set(function.keywords) - names)
        if unknown_names:
            raise ScorerSignatureError(
                f"{location}: the score function takes no argument "
                f"{', '.join(map(repr, unknown_names))}; check custom_reward_function.reward_kwargs"
            )
    names = accepted_names(function)
    call_arguments = accepted_arguments(function, dict.fromkeys(arguments), options)
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a builtin has no signature, so errors appear only in the first batch
    try:
        signature.bind(**call_arguments)
        if names is None or not names.isdisjoint(arguments):
            return
        problem = "it takes none of these"
    except TypeError as error:
        problem = str(error)
    name = getattr(unwrap_function(function), "__name__", "compute_score")
    raise ScorerSignatureError(
        f"{location}: the score function {name}{signature} cannot be called with "
        f"{', '.join(arguments)} ({problem}); write it as def {name}({', '.join(arguments[:-1])}, "
        f"{arguments[-1]}=None){_signature_hint(set(signature.parameters), arguments)}"
    )


def _signature_hint(names: set[str], arguments: Sequence[str]) -> str:
    """Returns the end of the error message: a hint about a common mistake in the signature."""
    if names & {"completion", "completions", "prompt", "prompts"}:
        return f". This looks like a TRL reward function: a completion is in {arguments[1]} here"
    if names & set(BATCH_ARGUMENTS) and tuple(arguments) != BATCH_ARGUMENTS:
        return ". Lists are passed by reward_model.reward_manager=batch"
    if names & set(ROW_ARGUMENTS) and tuple(arguments) == BATCH_ARGUMENTS:
        return ". Rows are passed one by one by reward_model.reward_manager=naive"
    if names > set(arguments):
        return ". Arguments of your own come from custom_reward_function.reward_kwargs"
    return ""


class DeadlineExceeded(BaseException):
    """Raised at the deadline; a scorer's `except Exception` does not catch a BaseException."""


def call_with_deadline(function: Callable[[], T], timeout_s: float) -> T:
    """Returns `function()`, or raises DeadlineExceeded after `timeout_s` seconds."""
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
        return _call_with_timer(function, timeout_s)
    future: Future[T] = Future()

    def run_function() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # `future.result()` raises it in the caller's thread
            future.set_exception(error)

    thread = threading.Thread(target=run_function, name="hone-score", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise DeadlineExceeded
    return future.result()


def _call_with_timer(function: Callable[[], T], timeout_s: float) -> T:
    def on_timer(signal_number: int, frame: FrameType | None) -> None:
        raise DeadlineExceeded

    outer_handler = signal.signal(signal.SIGALRM, on_timer)
    # The timer repeats, because a bare `except` in a scorer may catch the first signal.
    outer_remaining_s, outer_interval_s = signal.setitimer(
        signal.ITIMER_REAL, timeout_s, max(timeout_s, 1.0)
    )
    start_s = time.monotonic()
    try:
        try:
            return function()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    finally:  # again, because the signal may have interrupted the first `finally`
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, outer_handler)
        if outer_remaining_s:
            outer_remaining_s = max(outer_remaining_s - (time.monotonic() - start_s), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, outer_remaining_s, outer_interval_s)


def describe(function: Function) -> str:
    """Returns `name of file` for a function from a user's file, else `module.name`."""
    unwrapped = unwrap_function(function)
    name = getattr(unwrapped, "__qualname__", type(unwrapped).__qualname__)
    module = getattr(unwrapped, "__module__", "?")
    code = _code_of(unwrapped)
    if code is not None and str(module).startswith(("hone_extern_", "__main__")):
        return f"{name} of {code.co_filename}"
    return f"{module}.{name}"


def definition_location(function: Function) -> str | None:
    """Returns `file:line` of a function's definition, or None if the function is not written in Python."""
    code = _code_of(unwrap_function(function))
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def error_location(error: BaseException, function: Function) -> str | None:
    """Returns `file:line` of the innermost frame in the user's file, or of the definition."""
    frames = traceback.extract_tb(error.__traceback__)
    code = _code_of(unwrap_function(function))
    user_frames = [
        frame for frame in frames if code is not None and frame.filename == code.co_filename
    ]
    if code is None or _is_in_hone(code.co_filename):
        # `function` is hone's own, but may have called a registered rule in the user's file.
        outside_frames = [frame for frame in frames if not _is_in_hone(frame.filename)]
        user_frames = [f for f in outside_frames if not _is_in_library(f.filename)] or frames
    if not user_frames:
        return definition_location(function)
    return f"{user_frames[-1].filename}:{user_frames[-1].lineno}"


def unwrap_function(function: Function) -> Function:
    """Returns the function inside `partial` and `functools.wraps`."""
    while True:
        if isinstance(function, partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return function


def _code_of(function: Function) -> CodeType | None:
    code = getattr(function, "__code__", None)
    if code is None and callable(function):
        code = getattr(type(function).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _is_in_library(filename: str) -> bool:
    return filename.startswith(_LIBRARY_FOLDERS)


def _is_in_hone(filename: str) -> bool:
    return filename.startswith(_PACKAGE_FOLDER)
