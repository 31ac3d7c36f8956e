"""Awaiting user code: deadlines, its own time-outs, cancellations, and tasks that do not end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import threading
from typing import Any

import pytest

from hone import event_loop
from hone.event_loop import DeadlineExceeded, run_in_thread, run_with_deadline


async def late_with_own_word() -> None:
    raise TimeoutError("the server was slow")


async def cancels_itself() -> None:
    raise asyncio.CancelledError


def test_what_the_work_returns_comes_back() -> None:
    assert asyncio.run(run_with_deadline(asyncio.sleep(0, "done"), 60.0)) == "done"


def test_work_that_hangs_is_cancelled_and_overdue() -> None:
    ended: list[str] = []

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cleaned up")

    with pytest.raises(DeadlineExceeded, match=r"not done after 0\.01 s"):
        asyncio.run(run_with_deadline(hang(), 0.01))
    assert ended == ["cleaned up"]


def test_a_time_out_of_the_work_itself_is_not_ours() -> None:
    with pytest.raises(TimeoutError, match="the server was slow"):
        asyncio.run(run_with_deadline(late_with_own_word(), 60.0))


def test_work_that_cancels_itself_is_an_ordinary_failure() -> None:
    with pytest.raises(RuntimeError, match="it cancelled itself"):
        asyncio.run(run_with_deadline(cancels_itself(), None))


def test_a_cancelled_wait_cancels_the_work_and_stays_cancelled() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    async def run() -> bool:
        waiting = asyncio.create_task(run_with_deadline(work(), None))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait({waiting})
        return waiting.cancelled()

    assert asyncio.run(run())
    assert ended == ["cleaned up"]


def test_work_that_swallows_its_cancellation_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Closing the event loop waits for its tasks, so the abandoned task must not be among them."""
    monkeypatch.setattr(event_loop, "GRACE_S", 0.01)

    async def stubborn() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    outcome: list[Any] = []

    def run() -> None:
        try:
            asyncio.run(run_with_deadline(stubborn(), 0.01))
        except DeadlineExceeded as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert len(outcome) == 1
    assert "it is abandoned" in caplog.text


def test_a_cancellation_during_the_grace_time_leaves_the_work_behind_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The waiter is cancelled during the grace time of work that does not end."""
    outcome: list[Any] = []

    async def stubborn(is_cancelled: asyncio.Event) -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                is_cancelled.set()

    async def run() -> bool:
        in_grace = asyncio.Event()
        work = stubborn(in_grace)
        waiting = asyncio.create_task(run_with_deadline(work, 0.01, grace_s=3600.0))
        await in_grace.wait()
        waiting.cancel()
        await asyncio.wait({waiting})
        return waiting.cancelled()

    thread = threading.Thread(target=lambda: outcome.append(asyncio.run(run())), daemon=True)
    thread.start()
    thread.join(60)
    assert outcome == [True]
    assert "it is abandoned" in caplog.text


def test_work_cancelled_before_it_began_is_closed(recwarn: pytest.WarningsRecorder) -> None:
    async def run() -> None:
        waiting = asyncio.create_task(run_with_deadline(asyncio.sleep(0), None))
        asyncio.get_running_loop().call_soon(waiting.cancel)
        await asyncio.wait({waiting})

    asyncio.run(run())
    assert not [w for w in recwarn if "never awaited" in str(w.message)]


def test_a_ctrl_c_of_the_user_is_not_a_failure_of_the_work() -> None:
    async def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)  # the event loop's handler cancels
        await asyncio.sleep(3600)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run_with_deadline(interrupted(), 60.0))


def test_a_function_in_a_thread_returns_and_raises() -> None:
    assert asyncio.run(run_in_thread(divmod_of, a=7, b=2)) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run_in_thread(divmod_of, a=7, b=0))


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration(3)])
def test_an_exit_in_a_thread_is_an_ordinary_failure(error: BaseException) -> None:
    def leave() -> None:
        raise error

    with pytest.raises(RuntimeError, match=f"{type(error).__name__}: 3"):
        asyncio.run(run_with_deadline(run_in_thread(leave), 60.0))


def divmod_of(a: int, b: int) -> tuple[int, int]:
    return divmod(a, b)


def test_closing_the_event_loop_does_not_wait_for_a_thread() -> None:
    free, outcome = threading.Event(), list[Any]()

    def run() -> None:
        try:
            asyncio.run(run_with_deadline(run_in_thread(free.wait), 0.01))
        except DeadlineExceeded as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    ended = not thread.is_alive()
    free.set()
    assert ended
    assert len(outcome) == 1


def test_work_that_fails_while_its_caller_is_cancelled_is_not_logged_by_asyncio() -> None:
    contexts: list[Any] = []

    async def fail() -> None:
        raise ValueError("late")

    async def cancel_at(num_iterations: int) -> None:
        caller = asyncio.ensure_future(run_with_deadline(fail(), None))
        for _ in range(num_iterations):
            await asyncio.sleep(0)
        caller.cancel()
        await asyncio.wait({caller})
        if not caller.cancelled():
            caller.exception()

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: contexts.append(context)
        )
        for num_iterations in range(6):
            await cancel_at(num_iterations)
            gc.collect()

    asyncio.run(main())
    assert not contexts
