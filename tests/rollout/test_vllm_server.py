"""The commands of a vLLM process, with a fake of vLLM (tests/rollout/fake_vllm)."""

from __future__ import annotations

import asyncio
import socket
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from hone.rollout.contract import RolloutError
from hone.rollout.requests import Chunk
from hone.rollout.vllm_process import _LENGTH, EngineDied, EngineProcess
from hone.rollout.vllm_server import Server

from .test_vllm_process import started, with_process

ENDLESS = {"max_tokens": 10**6, "stop_token_ids": []}


@pytest.mark.parametrize("size", [0, 2, 20_000, 100_000])
def test_frames_of_any_length_arrive_whole(size: int) -> None:
    """`EngineProcess` writes and reads the frames itself; the server uses `multiprocessing`."""
    here, there = socket.socketpair()
    content = bytes(size)
    with here, Connection(there.detach()) as connection, here.makefile("rb") as file:
        here.sendall(_LENGTH.pack(size) + content)
        assert connection.recv_bytes() == content
        connection.send_bytes(content)
        assert file.read(_LENGTH.size + size) == _LENGTH.pack(size) + content


def test_a_command_that_is_answered_is_no_stall() -> None:
    """A ping may be read at any moment, so also while the answer is sent."""
    busy: list[float | None] = []

    class Pipe:
        def send_bytes(self, content: bytes) -> None:
            busy.append(server._busy_since)
            raise EOFError

    pipe: Any = Pipe()
    server = Server(pipe)
    server.start = lambda frame: "version"  # type: ignore[method-assign]
    server._commands.put({"verb": "start", "call": 1})
    with pytest.raises(EOFError):
        server.serve()
    assert busy == [None]


def test_a_pause_holds_tokens_and_what_was_drawn_comes_before_its_answer(tmp_path: Path) -> None:
    async def work(process: EngineProcess) -> None:
        await started(process)
        queue = process.open_stream("k")
        process.send("add", key="k", prompt=[1], sampling=ENDLESS)
        await queue.get()
        await process.call("pause")
        num_chunks = queue.qsize()
        await asyncio.sleep(0.05)
        assert queue.qsize() == num_chunks
        process.send("add", key="late", prompt=[1], sampling=ENDLESS)
        await process.call("resume")
        chunks = [await queue.get() for _ in range(num_chunks + 3)]
        tokens = [token for c in chunks if isinstance(c, Chunk) for token in c.token_ids]
        assert tokens == [i % 90 for i in range(2, len(tokens) + 2)]
        process.send("abort", keys=["k", "late", "unknown"])
        await process.call("pause")
        before = queue.qsize()
        await process.call("resume")
        await asyncio.sleep(0.02)
        assert queue.qsize() == before

    with_process(tmp_path, work)


@pytest.mark.parametrize("model", ["m", "two workers", "two machines"])
def test_weights_are_broadcast_where_a_worker_is_on_another_machine(
    model: str, tmp_path: Path
) -> None:
    """The fake looks at how it gets them. Several workers end with a command that has failed: some may have
    done it, or wait for the others."""
    bucket = {"tensors": [], "size": 0, "path": "/dev/null"}

    async def work(process: EngineProcess) -> None:
        await started(process)
        await process.call("load", first=True, bucket=bucket)
        await process.call("finish")
        alone = model == "m"
        with pytest.raises(RolloutError if alone else EngineDied, match="AssertionError"):
            await process.call("load", first=False, bucket=bucket)
        assert process.alive is alone

    with_process(tmp_path, work, model=model)


def test_a_bucket_that_begins_an_update_ends_one_that_stayed_open(tmp_path: Path) -> None:
    bucket = {"tensors": [], "size": 0, "path": "/dev/null"}

    async def work(process: EngineProcess) -> None:
        await started(process)
        for first in (True, False, True):
            await process.call("load", first=first, bucket=bucket)
        await process.call("finish")
        for level in (0, 2):
            await process.call("sleep", level=level)
        await process.call("wake_up")
        with pytest.raises(Exception, match="AssertionError"):
            await process.call("load", first=False, bucket=bucket)

    with_process(tmp_path, work)
