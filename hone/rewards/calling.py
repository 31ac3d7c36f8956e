"""Calls a plain or async scorer with the arguments that it accepts, until a deadline, and checks the result.

Built-in, user-defined and registered scorers have different signatures; only this file knows them.
A scorer's exception becomes a `Failed`; the manager counts it and applies the failure policy.

The deadline is soft, because Python cannot kill a running function. In the main thread, a timer
signal interrupts the call. In other threads, the call runs in a helper thread, which is abandoned at
the deadline. The prime manager's processes have a hard deadline.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from functools import lru_cache, partial
from types import FrameType
from typing import Any, TypeVar

from hone.event_loop import raised_by_signal, run_coroutine
from hone.rewards.failures import Failed, Scored, SetupError
from hone.rewards.rows import ScorerInput, to_python
from hone.rewards.scorer_code import definition_location, describe, error_location, unwrap_function
from hone.text import error_text, printable, short_repr
from hone.types import Fields, Function, JsonObject, Settings

T = TypeVar("T")

ROW_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""The arguments of the batch manager: lists with one item per response."""
FORMAT_ARGUMENTS = (
    *("format_score", "structure_format_score", "final_format_score", "retrieval_score"),
)
"""Format rewards: config keys under `reward_model` that only some scorers accept."""
OPTIONAL_ARGUMENTS = frozenset(
    {
        *(*FORMAT_ARGUMENTS, "score_observations"),
        *("sandbox_fusion_url", "concurrent_semaphore", "memory_limit_mb"),
        *("reward_router_address", "reward_model_tokenizer"),
    }
)
"""Arguments that a scorer gets if it accepts them; other scorers are called without them."""

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


def score_row(function: Function, row: ScorerInput, options: Settings) -> Scored | Failed:
    """Scores one row. A SetupError is raised under every failure policy."""
    try:
        with counted_mishaps() as mishaps:
            result = call_scorer(function, row.arguments(), options)
        return read_result(result, mishaps)
    except (Exception, SystemExit) as error:  # a user's scorer may raise anything
        return failure_of(error, function)


async def await_row(
    function: Function, row: ScorerInput, options: Settings, timeout_s: float | None
) -> Scored | Failed:
    """Scores one row with an async scorer; a scorer with the attribute `has_own_deadline` gets no other."""
    if any(getattr(f, "has_own_deadline", False) for f in (function, unwrap_function(function))):
        timeout_s = None
    try:
        with counted_mishaps() as mishaps:
            arguments = accepted_arguments(function, row.arguments(), options)
            call = asyncio.ensure_future(await_scorer(function, arguments))
            done, _ = await asyncio.wait({call}, timeout=timeout_s)
        if not done:
            call.cancel()  # not awaited, because the call may ignore the cancellation
            return Failed("timeout", f"no score after {timeout_s:g} s")
        if call.cancelled():
            raise RuntimeError("the call cancelled itself (asyncio.CancelledError)")
        return read_result(call.result(), mishaps)
    except (Exception, SystemExit) as error:  # a user's scorer may raise anything
        return failure_of(error, function)


def failure_of(error: BaseException, function: Function) -> Failed:
    """Returns the failure for a scorer's exception; raises a SetupError, and the exit of a scheduler."""
    if isinstance(error, SetupError) or (isinstance(error, SystemExit) and raised_by_signal(error)):
        raise error
    location = error_location(error, function)
    where = f" at {location}" if location else ""
    return Failed(
        "exception",
        # The message may quote the response, whose control characters would reach the terminal.
        f"{describe(function)} raised {printable(error_text(error))}{where}",
        tuple(cls.__name__ for cls in type(error).__mro__),
    )


def read_result(result: Any, mishaps: Mapping[str, int] | None = None) -> Scored | Failed:
    """Converts a scorer's result: a number, a dict with `score`, a tuple (score, …), or Failed."""
    if isinstance(result, Failed):
        return result
    extras: JsonObject = {}
    value = result
    if isinstance(result, Mapping):
        if "score" not in result:
            return Failed("bad_return", f"a dict without 'score': keys {sorted(map(str, result))}")
        value = result["score"]
        extras = {str(key): to_python(item) for key, item in result.items() if key != "score"}
    elif isinstance(result, (tuple, list)):
        if not result:
            return Failed("bad_return", "an empty sequence")
        value = result[0]
    if isinstance(value, (str, bytes)):
        return Failed("bad_return", f"text ({short_repr(value)}), not a number")
    try:
        score = float(value)
    except OverflowError:
        return Failed("inf", "the score is larger than any float")
    except Exception:  # a user's object may raise anything
        detail = f"{short_repr(value)} of type {type(value).__name__}, not a number"
        return Failed("bad_return", detail)
    if math.isnan(score):
        return Failed("nan", "the score is NaN")
    if math.isinf(score):
        return Failed("inf", f"the score is {score}")
    return Scored(score, extras, dict(mishaps or {}))


def is_async(function: Function) -> bool:
    """Returns whether a call of the function or object returns a coroutine."""
    unwrapped = unwrap_function(function)
    call = getattr(type(unwrapped), "__call__", None)  # noqa: B004
    return any(map(inspect.iscoroutinefunction, (function, unwrapped, call)))


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
    return frozenset(
        p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    )


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
    """Returns a hint about a common mistake in the signature, for the end of a message."""
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
    if threading.current_thread() is threading.main_thread():
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
