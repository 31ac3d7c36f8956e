"""Runs user code (agent loops, tools, interactions) in event loops that always close.

`asyncio.run` stops at the first SystemExit of any task, and then waits forever for tasks that
ignore cancellation and for threads of `asyncio.to_thread`. `run_with_deadline` awaits a coroutine
with a deadline. Code that blocks its event loop cannot be interrupted.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import inspect
import logging
import signal
import threading
import time
import traceback
from asyncio.tasks import _unregister_task
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger(__name__)

GRACE_S = 2.0
"""Default seconds that a cancelled task gets to clean up before it is abandoned."""
_SUBMIT_ITERATIONS = 16
"""Event-loop iterations (a few µs each) in which agent loops can submit their next requests.

An agent loop needs 9 iterations to call a tool and submit the next request."""
_SUBMIT_TIMEOUT_S = 5.0
"""If an agent loop blocks the event loop for longer, decoding continues without that loop's request."""
_POLL_S = 0.001
"""Seconds between two checks of `wait_for_requests` whether the coroutine has ended."""
_SIGNAL_POLL_S = 0.05
"""The longest wait at a time of a thread that a signal must end: a signal just before a wait ends it late."""


def get_event_loop() -> asyncio.AbstractEventLoop:
    """Returns the running event loop, or sets a new one for this thread (named as in verl)."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop


def wait_for_result(future: Future[T]) -> T:
    """Returns the result of the future; an interrupt ends the wait, whenever it arrives."""
    while not wait([future], timeout=_SIGNAL_POLL_S).done:
        pass
    return future.result()


def call_soon_in_loop(
    loop: asyncio.AbstractEventLoop, callback: Callable[P, None], *args: P.args, **kwargs: P.kwargs
) -> bool:
    """Schedules a callback on a loop from any thread; returns False if the loop has closed."""
    try:
        loop.call_soon_threadsafe(functools.partial(callback, *args, **kwargs))
    except RuntimeError:
        return False
    return True


def run_coroutine(coroutine: Coroutine[None, None, T]) -> T:
    """Runs the coroutine in a new event loop and returns its result.

    If this thread already runs an event loop, as in a notebook, the new loop runs in another thread.
    """
    run = EventLoopRun(coroutine)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run.run()
    with ThreadPoolExecutor(max_workers=1) as executor:
        # The executor does not join a thread whose start is interrupted, so the thread starts before the run.
        executor.submit(int).result()
        try:
            return wait_for_result(executor.submit(run.run))
        except KeyboardInterrupt:  # the stop button of a notebook
            run.cancel()
            raise


class EventLoopRun(Generic[T]):
    """Runs one coroutine in one event loop; another thread may cancel it."""

    def __init__(self, coroutine: Coroutine[None, None, T]) -> None:
        self._coroutine = coroutine
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DAEMON_THREADS)
        self._task: asyncio.Task[T] | None = None
        self._interrupt_count = 0

    def run(self) -> T:
        """Runs the coroutine, cancels the remaining tasks and closes the loop."""
        previous_handler = None
        is_main_thread = threading.current_thread() is threading.main_thread()
        if is_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            previous_handler = signal.signal(signal.SIGINT, self._interrupt)
        try:
            asyncio.set_event_loop(self._loop)
            self._task = self._loop.create_task(self._coroutine)
            return _run_until_done(self._loop, self._task)
        except asyncio.CancelledError:
            if self._interrupt_count:
                raise KeyboardInterrupt from None
            raise
        finally:
            try:
                _cancel_remaining_tasks(self._loop)
            finally:
                asyncio.set_event_loop(None)
                self._loop.close()
                if previous_handler is not None:
                    signal.signal(signal.SIGINT, previous_handler)

    def cancel(self) -> None:
        """Cancels the coroutine from any thread; the coroutine can still clean up."""

        def cancel_task() -> None:
            if self._task is not None:
                self._task.cancel()

        self.call_soon(cancel_task)

    def call_soon(self, callback: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Schedules a callback from any thread; returns False if the loop has closed."""
        return call_soon_in_loop(self._loop, callback, *args, **kwargs)

    def _interrupt(self, signal_number: int, frame: FrameType | None) -> None:
        """Handles Ctrl-C: cancels the coroutine; the second interrupt raises KeyboardInterrupt at once."""
        self._interrupt_count += 1
        if self._interrupt_count > 1:
            raise KeyboardInterrupt
        self.cancel()


class LoopThread(EventLoopRun[T]):
    """Runs one coroutine, and the tasks that it starts, in an event loop in a separate thread.

    `outcome` gets the result or the exception of the coroutine; the thread then calls `on_end`.
    """

    def __init__(self, coroutine: Coroutine[None, None, T], on_end: Callable[[], None]) -> None:
        super().__init__(coroutine)
        self.outcome: Future[T] = Future()
        self._on_end = on_end
        self._requests_submitted = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run_in_thread, name="hone-loops", daemon=True).start()

    def _run_in_thread(self) -> None:
        try:
            self.outcome.set_result(self.run())
        except BaseException as error:
            self.outcome.set_exception(error)
        self._requests_submitted.set()
        self._on_end()

    def wait_for_requests(self) -> None:
        """Waits until the tasks that got a result from the engine have submitted their next requests."""
        self._requests_submitted = submitted = threading.Event()
        if not self.call_soon(_set_after_iterations, _SUBMIT_ITERATIONS, submitted):
            return
        deadline = time.monotonic() + _SUBMIT_TIMEOUT_S
        while not submitted.wait(_POLL_S) and not self.outcome.done():
            if time.monotonic() > deadline:
                logger.warning(
                    "an agent loop has blocked its event loop for %.0f s; decoding goes on without it",
                    _SUBMIT_TIMEOUT_S,
                )
                return

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds` for the coroutine, and returns whether it has ended."""
        return bool(wait([self.outcome], timeout=seconds).done)


def _set_after_iterations(iterations: int, event: threading.Event) -> None:
    """Sets the event after this number of iterations of the running event loop."""
    if iterations == 0:
        event.set()
    else:
        asyncio.get_running_loop().call_soon(_set_after_iterations, iterations - 1, event)


class DaemonThreadExecutor(ThreadPoolExecutor):
    """Runs each function in a new daemon thread; closing an event loop does not wait for the thread."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:  # raised in the task that awaits the future
                    future.set_exception(as_exception(error))

        threading.Thread(target=run, name="hone-executor", daemon=True).start()
        return future


DAEMON_THREADS = DaemonThreadExecutor()
"""The executor of `asyncio.to_thread` and `run_in_thread`."""


def as_exception(error: BaseException) -> Exception:
    """Returns the error, or a RuntimeError if the error would affect an event loop or its `str` fails.

    A SystemExit would stop the event loop, and the CancelledError of a thread pool would cancel the task.
    """
    try:
        text = str(error)
    except Exception:  # user-defined `__str__` failed; keep the class name
        return RuntimeError(f"{type(error).__name__} (its message cannot be shown)")
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, CancelledError)):
        return error
    return RuntimeError(f"{type(error).__name__}: {text}")


def raised_by_signal(error: BaseException) -> bool:
    """Whether a handler of SIGINT, SIGTERM or a timer raised the error, and not the interrupted code."""
    if threading.current_thread() is not threading.main_thread():
        return False  # Python runs signal handlers in the main thread
    codes = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        handler = signal.getsignal(signal_number)
        if handler is signal.default_int_handler:
            if isinstance(error, KeyboardInterrupt):  # the default handler is in C and has no frame
                return True
            continue
        while isinstance(handler, functools.partial):
            handler = handler.func
        if getattr(getattr(handler, "__func__", handler), "__code__", None) in codes:
            return True
    return False


def abandon_task(task: asyncio.Future[T]) -> None:
    """Abandons a task that ignores its cancellation, so that the event loop can close.

    The task is never freed: Python would raise GeneratorExit in it, and code that catches every
    exception in a loop would then run forever in this thread.
    """
    logger.warning("%r ignores its cancellation; it is abandoned", task)
    assert isinstance(task, asyncio.Task)
    _unregister_task(task)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))


def _run_until_done(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T]) -> T:
    """Runs the loop until the task is done, even if other tasks or callbacks raise SystemExit."""
    while True:
        try:
            return loop.run_until_complete(task)
        except BaseException as error:
            if task.done() or raised_by_signal(error):
                raise
            logger.warning(
                "a task of an agent loop raised %s: %s; the other tasks continue",
                type(error).__name__,
                error,
            )


def _cancel_remaining_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancels the remaining tasks; abandons those that are not done after GRACE_S."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    _wait_and_release(loop, tasks)
    # Closed after the tasks have ended, because a task may still iterate over a generator.
    _wait_and_release(loop, {loop.create_task(loop.shutdown_asyncgens())})


def _wait_and_release(loop: asyncio.AbstractEventLoop, tasks: set[asyncio.Task[None]]) -> None:
    """Waits up to GRACE_S for the tasks; abandons those that are not done."""
    if tasks:
        _run_until_done(loop, loop.create_task(asyncio.wait(tasks, timeout=GRACE_S)))
    for task in tasks:
        _release(task)


def _release(task: asyncio.Future[T]) -> None:
    """Abandons a task that is not done; retrieves the exception of a task that is done.

    asyncio would log an exception that was not retrieved.
    """
    if not task.done():
        abandon_task(task)
    elif not task.cancelled():
        task.exception()


class DeadlineExceeded(Exception):
    """Raised at the deadline of `run_with_deadline`; a TimeoutError is the coroutine's own."""


async def run_with_deadline(
    work: Coroutine[None, None, T], seconds: float | None, *, grace_s: float | None = None
) -> T:
    """Returns the result of a coroutine; raises DeadlineExceeded after `seconds` (None: no deadline).

    At the deadline the coroutine is cancelled, and has `grace_s` (default GRACE_S) seconds to clean up. A
    SystemExit of the coroutine becomes a RuntimeError, because a SystemExit would end the event loop.
    """
    task = asyncio.ensure_future(_convert_exits(work))
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        try:
            if task.cancel():  # False if the task is done
                await asyncio.wait({task}, timeout=GRACE_S if grace_s is None else grace_s)
        finally:  # even if the wait for the clean-up is cancelled
            _release(task)
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()  # the task was cancelled before the work started
    if not done:
        raise DeadlineExceeded(f"not done after {seconds:g} s")
    if (
        task.cancelled()
    ):  # by the coroutine: a cancellation of this function is raised by the wait above
        raise RuntimeError("it cancelled itself (asyncio.CancelledError)")
    return task.result()


async def _convert_exits(work: Coroutine[None, None, T]) -> T:
    """Awaits the work, and converts a SystemExit to a RuntimeError; a Ctrl-C is raised unchanged."""
    try:
        return await work
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        # A GeneratorExit raised in this frame means that this coroutine is being closed.
        is_raised_here = error.__traceback__ is None or error.__traceback__.tb_next is None
        is_closing = isinstance(error, GeneratorExit) and is_raised_here
        exception = as_exception(error)
        if is_closing or raised_by_signal(error) or exception is error:
            raise
        raise exception from error


async def run_in_thread(function: Callable[..., T], **arguments: Any) -> T:
    """Calls a blocking function in a daemon thread that is not joined at exit.

    asyncio.to_thread is not used, because closing its event loop waits for every thread it started.
    """
    return await asyncio.wrap_future(DAEMON_THREADS.submit(function, **arguments))


@dataclass
class PhaseDeadlines:
    """The deadline of each phase: the larger of `floor_s` and `factor` times its longest completed run.

    A phase is a worker's method, or an agent loop, whose seconds are those of decoding.
    """

    floor_s: float
    """`trainer.phase_deadline_floor_s`."""
    factor: float
    """`trainer.phase_deadline_factor`."""
    longest_run_s: dict[str, float] = field(default_factory=dict)
    """The longest completed run of each phase."""

    def limit_s(self, phase: str) -> float:
        """Returns the deadline of the phase's next run."""
        return max(self.floor_s, self.factor * self.longest_run_s.get(phase, 0.0))

    def record(self, phase: str, seconds: float) -> None:
        """Records the duration of a completed run."""
        self.longest_run_s[phase] = max(seconds, self.longest_run_s.get(phase, 0.0))

    def advice(self, phase: str) -> str:
        """Returns the end of an error message: where the limit comes from and how to raise it."""
        longest_run_s = self.longest_run_s.get(phase)
        if longest_run_s is None or self.factor * longest_run_s <= self.floor_s:
            return "raise trainer.phase_deadline_floor_s if the work is that long"
        return (
            f"raise trainer.phase_deadline_factor (the limit is {self.factor:g} times the longest "
            f"run so far, {longest_run_s:.3g} s) if the work is that long"
        )
