"""A vLLM process, with a fake of vLLM: its start, every way in which it ends, and the files it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from hone.rollout import vllm_process
from hone.rollout.contract import RolloutError
from hone.rollout.requests import Chunk
from hone.rollout.vllm_process import EngineDied, EngineProcess, LaunchArguments

T = TypeVar("T")
SAMPLING = {"max_tokens": 5, "stop_token_ids": []}


def fake_python(folder: Path) -> str:
    """An interpreter that has the fake vLLM."""
    path = folder / "python"
    fake = Path(__file__).parent / "fake_vllm"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{fake}:$PYTHONPATH" exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


def with_process(
    folder: Path, work: Callable[[EngineProcess], Awaitable[T]], model: str = "m", **timeouts: float
) -> T:
    async def run() -> T:
        process = EngineProcess(LaunchArguments(fake_python(folder), {"model": model}, **timeouts))
        try:
            return await asyncio.wait_for(work(process), 200)
        finally:
            await process.stop()

    return asyncio.run(run())


async def started(process: EngineProcess) -> None:
    await process.start()
    process.serving = True


def group_members(leader: int) -> list[int]:
    """Returns the processes of a group that run; zombies do not count."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                pids.append(int(path.parent.name))
    return pids


def test_tokens_come_in_a_stream_until_the_end(tmp_path: Path) -> None:
    async def work(process: EngineProcess) -> list[Chunk | Exception]:
        await started(process)
        queue = process.open_stream("k")
        process.send("add", key="k", prompt=[5, 6], sampling=SAMPLING)
        chunks = [await queue.get()]
        while isinstance(chunks[-1], Chunk) and not chunks[-1].finished:
            chunks.append(await queue.get())
        process.close_stream("k")
        return chunks

    chunks = with_process(tmp_path, work)
    assert [t for c in chunks if isinstance(c, Chunk) for t in c.token_ids] == [2, 3, 4, 5, 6]
    assert [c.finished for c in chunks if isinstance(c, Chunk)] == [False] * (len(chunks) - 1) + [
        True
    ]
    assert len(chunks) > 1, "the first token came with the last"


def test_a_refused_request_fails_alone_and_an_error_of_a_command_comes_back(tmp_path: Path) -> None:
    async def work(process: EngineProcess) -> None:
        await started(process)
        queue = process.open_stream("k")
        process.send("add", key="k", prompt=[96], sampling=SAMPLING)
        assert "96 is refused" in str(await queue.get())
        with pytest.raises(RolloutError, match="AssertionError"):
            await process.call("finish")
        assert process.alive

    with_process(tmp_path, work)


def test_a_model_that_does_not_load_says_why(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="ValueError: no such model"):
        with_process(tmp_path, lambda process: process.start(), model="broken")


def test_the_start_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_process, "_PROGRESS_INTERVAL_S", 0.1)
    with pytest.raises(RolloutError, match=r"was not ready after .*start_timeout_s"):
        with_process(tmp_path, lambda p: p.start(), model="slow", start_timeout_s=0.3)


@pytest.mark.parametrize("death", ["step", "kill", "stall"])
def test_a_death_reaches_streams_and_calls_and_leaves_nothing(
    death: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(process: EngineProcess) -> tuple[int, str]:
        await started(process)
        if death == "stall":
            monkeypatch.setattr(vllm_process, "_PING_INTERVAL_S", 0.05)
        pid, queue = process.pid, process.open_stream("k")
        prompt = {"step": [93], "kill": [1], "stall": [97]}[death]
        process.send("add", key="k", prompt=prompt, sampling={**SAMPLING, "max_tokens": 10**6})
        if death == "kill":
            await queue.get()
            os.kill(pid, signal.SIGKILL)  # kills the process, not its group
        while not isinstance(item := await queue.get(), Exception):
            pass
        assert isinstance(item, EngineDied)
        with pytest.raises(EngineDied) as late_call:
            await process.call("pause")
        assert str(late_call.value) == str(item), "a call after the death names another reason"
        with pytest.raises(EngineDied):
            process.open_stream("late")
        await process.start()  # a new process
        assert process.pid != pid
        await process.call("pause")
        return pid, str(item)

    monkeypatch.setattr(vllm_process, "_PING_INTERVAL_S", 0.05 if death == "stall" else 15.0)
    timeouts = {"stall_timeout_s": 0.5} if death == "stall" else {}
    pid, reason = with_process(tmp_path, work, **timeouts)
    assert not group_members(pid)
    if death == "step":
        assert "RuntimeError: the kernel failed" in reason


def test_an_error_in_the_reader_fails_streams_and_calls_instead_of_leaving_them_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(process: EngineProcess) -> None:
        await started(process)
        queue = process.open_stream("k")
        monkeypatch.setattr(process, "_handle_frame", lambda frame: frame["no such entry"])
        with pytest.raises(EngineDied):
            await asyncio.wait_for(process.call("pause"), 30)
        assert isinstance(await queue.get(), EngineDied)

    with_process(tmp_path, work)


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, None])
def test_no_process_outlives_its_parent(tmp_path: Path, end: signal.Signals | None) -> None:
    """The parent is killed, is terminated, or exits."""
    code = (
        "import asyncio, sys\n"
        "from hone.rollout.vllm_process import EngineProcess, LaunchArguments\n"
        "async def main():\n"
        f"    process = EngineProcess(LaunchArguments({fake_python(tmp_path)!r}, {{'model': 'm'}}))\n"
        "    await process.start()\n"
        "    print(process.pid, process._folder.path, flush=True)\n"
        f"    await asyncio.sleep({0 if end is None else 1000})\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().decode().split()
        if end is not None:
            parent.send_signal(end)
        parent.wait(60)
    deadline = time.monotonic() + 60
    while (group_members(int(pid)) or Path(folder).exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not group_members(int(pid))
    assert not Path(folder).exists()
