"""An event loop for code of the user's own: it always closes, and outlives what that code raises."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from hone import event_loop
from hone.event_loop import EventLoopRun, raised_by_signal, run_coroutine, run_in_thread


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "GRACE_S", 0.05)


def ended(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """What the coroutine gives, from a thread that must end."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(run_coroutine(work()))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert outcome, "the event loop never closed"
    return outcome[0]


async def stubborn() -> None:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


def test_what_the_coroutine_returns_and_raises_comes_back() -> None:
    async def wrong() -> None:
        raise LookupError("own")

    assert run_coroutine(asyncio.sleep(0, "done")) == "done"
    with pytest.raises(LookupError, match="own"):
        run_coroutine(wrong())


def test_a_task_that_swallows_its_cancellation_is_left_behind() -> None:
    async def work() -> str:
        work.task = asyncio.create_task(stubborn())  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        return "done"

    assert ended(work) == "done"


def test_a_task_that_swallows_everything_does_not_spin_when_the_process_ends() -> None:
    """Freed, its code would run once more, outside of any event loop, and never end."""
    program = """
import asyncio, gc, sys
sys.path.insert(0, sys.argv[1])  # this file alone: the package's torch takes seconds
import event_loop
event_loop.GRACE_S = 0.01
async def swallows():
    while True:
        try:
            await asyncio.sleep(3600)
        except BaseException:
            pass
async def work():
    asyncio.create_task(swallows())
    await asyncio.sleep(0)
event_loop.run_coroutine(work())
gc.collect()
print("collected")
"""
    command = [sys.executable, "-c", program, str(Path(event_loop.__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "collected\n"


def test_a_thread_of_to_thread_is_not_waited_for() -> None:
    free = threading.Event()

    async def work() -> str:
        work.task = asyncio.create_task(asyncio.to_thread(free.wait))  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)
        return "done"

    try:
        assert ended(work) == "done"
    finally:
        free.set()


def test_a_generator_that_does_not_close_is_left_behind() -> None:
    async def endless() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await stubborn()

    async def work() -> int:
        work.source = endless()  # type: ignore[attr-defined]
        return await anext(work.source)  # type: ignore[attr-defined]

    assert ended(work) == 1


def test_a_generator_is_closed_after_the_task_that_iterates_over_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_loop, "GRACE_S", 60.0)
    errors, closed = [], []

    async def numbers() -> AsyncIterator[int]:
        try:
            while True:
                await asyncio.sleep(1)
                yield 1
        finally:
            await asyncio.sleep(0.01)
            closed.append(True)

    async def iterate() -> None:
        async for _ in numbers():
            pass

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        work.task = asyncio.create_task(iterate())  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)

    ended(work)
    assert closed == [True]
    assert errors == []


def test_to_thread_answers_and_raises() -> None:
    assert run_coroutine(asyncio.to_thread(divmod, 7, 2)) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        run_coroutine(asyncio.to_thread(divmod, 7, 0))
    with pytest.raises(RuntimeError, match="SystemExit: 4"):
        run_coroutine(asyncio.to_thread(sys.exit, 4))


def test_a_cancelled_future_in_a_thread_does_not_cancel_the_task() -> None:
    def wait_for_cancelled_future() -> None:
        raise CancelledError("the pool has shut down")

    with pytest.raises(RuntimeError, match="CancelledError: the pool has shut down"):
        run_coroutine(run_in_thread(wait_for_cancelled_future))


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt("own")])
def test_an_exit_of_another_task_ends_only_that_task(error: BaseException) -> None:
    async def leaves() -> None:
        raise error

    async def work() -> str:
        task = asyncio.create_task(leaves())
        await asyncio.sleep(0.01)
        return repr(task.exception())

    assert run_coroutine(work()) == repr(error)


def test_a_callback_that_stops_the_loop_stops_nothing_else() -> None:
    async def work() -> str:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.01)
        return "done"

    assert run_coroutine(work()) == "done"


def test_another_thread_may_cancel() -> None:
    begun, cleaned = threading.Event(), list[str]()

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            cleaned.append("up")

    def cancel() -> None:
        begun.wait(60)
        running.cancel()

    running = EventLoopRun(work())
    threading.Thread(target=cancel, daemon=True).start()
    with pytest.raises(asyncio.CancelledError):
        running.run()
    assert cleaned == ["up"]
    running.cancel()


def test_a_ctrl_c_cancels_the_coroutine_and_is_raised() -> None:
    cleaned: list[str] = []

    async def work() -> None:
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append("up")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_coroutine(work())
    assert cleaned == ["up"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_does_not_wait_for_the_coroutine() -> None:
    async def work() -> None:
        signal.raise_signal(signal.SIGINT)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        signal.raise_signal(signal.SIGINT)
        await stubborn()

    with pytest.raises(KeyboardInterrupt):
        run_coroutine(work())


def test_a_signals_error_is_told_from_the_codes_own() -> None:
    def handler(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    def handler_that_calls(number: int, frame: Any) -> None:
        handler_like()

    errors = []
    before = signal.getsignal(signal.SIGINT)
    try:
        for the_handler in (handler, handler_that_calls):
            signal.signal(signal.SIGINT, the_handler)
            for act in (lambda: signal.raise_signal(signal.SIGINT), lambda: handler_like()):
                try:
                    act()
                except KeyboardInterrupt as error:
                    errors.append(raised_by_signal(error))
    finally:
        signal.signal(signal.SIGINT, before)
    assert errors == [True, False, True, False]


def test_an_alarm_whose_handler_calls_a_function_that_raises_ends_the_run() -> None:
    def fail() -> None:
        raise TimeoutError("the alarm of the caller")

    before = signal.signal(signal.SIGALRM, lambda *_: fail())
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(TimeoutError, match="the alarm of the caller"):
            run_coroutine(asyncio.wait_for(asyncio.Event().wait(), 30))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def handler_like() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_in_a_notebook_cancels_the_coroutine_that_it_waits_for() -> None:
    cancelled = threading.Event()
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    async def decode() -> None:
        try:
            signal.pthread_kill(main_thread, signal.SIGINT)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def cell() -> None:
        with pytest.raises(KeyboardInterrupt):
            run_coroutine(decode())

    loop = asyncio.new_event_loop()  # without the handler of `asyncio.run`, as in a notebook
    try:
        loop.run_until_complete(cell())
    finally:
        loop.close()
    assert cancelled.is_set()


def test_an_interrupt_that_does_not_wake_the_waiting_thread_cancels_the_coroutine() -> None:
    """A signal wakes no thread that is about to wait, and `interrupt_main` never wakes one."""
    cancelled = threading.Event()

    async def decode() -> None:
        try:
            await asyncio.sleep(0.5)  # the main thread waits
            _thread.interrupt_main()
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def cell() -> None:
        with pytest.raises(KeyboardInterrupt):
            run_coroutine(decode())

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(cell())
    finally:
        loop.close()
    assert cancelled.is_set()
