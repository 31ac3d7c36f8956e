"""A vLLM process: its start, its commands over a socket, its health checks and its end.

All methods run in one event loop; the process ends with the thread of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from hone.rollout.contract import RolloutError
from hone.rollout.requests import Chunk, ConnectionLost
from hone.types import Fields

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("!I")
_PROGRESS_INTERVAL_S = 10.0
_PING_INTERVAL_S = 15.0
_PONG_TIMEOUT_S = 120.0
"""Pings are answered by a thread that does not compute."""
_EXIT_TIMEOUT_S = 30.0
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
_FILES = {
    "vllm_server.py": "server.py",
    "vllm_worker.py": "hone_vllm_worker.py",
    "../ops/counter_rng.py": "hone_counter_rng.py",
}


class EngineDied(ConnectionLost):
    """The process has ended; requests may be issued again to another."""


@dataclass(frozen=True)
class Launch:
    """The arguments of a process."""

    python: str
    engine: Fields
    """The arguments of `vllm.LLM`."""
    environment: dict[str, str] = field(default_factory=dict)
    start_timeout_s: float = 600.0
    stall_timeout_s: float = 600.0
    """The longest duration of a command or a decode step."""
    weights: str = "auto"
    """`rollout.vllm.weights`."""


class EngineProcess:
    """One vLLM engine in a child process; `start` also restarts it."""

    def __init__(self, launch: Launch, name: str = "vLLM") -> None:
        self._launch, self._name = launch, name
        self.alive = False
        self.serving = False
        """Whether it accepts requests; the engine sets it once the process has the current weights."""
        self.starts_without_tokens = 0
        self.loading = False
        """Whether it has loaded buckets of the current update."""
        self.missed_bucket = False
        """Whether it has died during the current update, and lacks buckets."""
        self.stale = False
        """Whether its weights are not the current ones."""
        self._child: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._calls: dict[int, asyncio.Future[object]] = {}
        self._numbers = count()
        self._streams: dict[str, asyncio.Queue[Chunk | Exception]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._writer: asyncio.StreamWriter | None = None
        self._pong: asyncio.Future[float] | None = None
        self._closed = False

    @property
    def lacks_update(self) -> bool:
        """Whether it does not serve yet, or not with the weights of the current update."""
        return not self.serving or self.loading or self.missed_bucket or self.stale

    @property
    def load(self) -> int:
        return len(self._streams)

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    async def start(self) -> None:
        """Starts the process and waits until it can decode."""
        await self.stop()
        self.starts_without_tokens += 1
        start = time.monotonic()
        await self._spawn()
        launch = self._launch
        starting = asyncio.ensure_future(
            self.call("start", engine=launch.engine, weights=launch.weights)
        )
        while not (await asyncio.wait({starting}, timeout=_PROGRESS_INTERVAL_S))[0]:
            seconds = time.monotonic() - start
            if seconds > launch.start_timeout_s:
                last = self._last_line()
                starting.cancel()
                await self.stop()
                raise RolloutError(
                    f"{self._name} was not ready after {seconds:.0f} s (rollout.vllm.start_timeout_s); "
                    f"the last line of its log: {last}"
                )
            log.info("%s starts (%.0f s): %s", self._name, seconds, self._last_line())
        version = starting.result()
        seconds = time.monotonic() - start
        log.info("%s %s is ready after %.0f s (pid %d)", self._name, version, seconds, self.pid)

    async def _spawn(self) -> None:
        if self._closed:
            raise EngineDied(f"{self._name} was closed")
        shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self._folder = Path(tempfile.mkdtemp(prefix="hone-vllm-", dir=shared))
        here = Path(__file__).parent
        for source, copy in _FILES.items():
            shutil.copyfile(here / source, self._folder / copy)
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        # Another interpreter has its own packages; this one may have vLLM from PYTHONPATH.
        inherited = self._launch.python == sys.executable and os.environ.get("PYTHONPATH")
        path = f"{self._folder}{os.pathsep}{inherited}" if inherited else str(self._folder)
        environment |= self._launch.environment | {"PYTHONPATH": path}
        parent_socket, child_socket = socket.socketpair()
        with (self._folder / "log").open("wb") as file, child_socket:
            self._child = subprocess.Popen(
                [self._launch.python, str(self._folder / "server.py"), str(child_socket.fileno())],
                pass_fds=[child_socket.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )
        reader, self._writer = await asyncio.open_connection(sock=parent_socket)
        self.alive, self.loading, self.missed_bucket, self.stale = True, False, False, False
        self._tasks = [
            asyncio.ensure_future(self._read(reader)),
            asyncio.ensure_future(self._watch()),
        ]

    # -- frames ---------------------------------------------------------------------------------

    def send(self, verb: str, **arguments: object) -> None:
        """Sends a command without result; a dead process gets none."""
        if self.alive:
            assert self._writer is not None
            content = json.dumps({"verb": verb, **arguments}, separators=(",", ":")).encode()
            self._writer.write(_LENGTH.pack(len(content)) + content)

    async def call(self, verb: str, **arguments: object) -> object:
        """Returns the result of a command; raises EngineDied, or vLLM's error as RolloutError."""
        if not self.alive:
            raise EngineDied(f"{self._name} is not running")
        number = next(self._numbers)
        self._calls[number] = asyncio.get_running_loop().create_future()
        self.send(verb, call=number, **arguments)
        return await self._calls[number]

    def open_stream(self, key: str) -> asyncio.Queue[Chunk | Exception]:
        """Returns the queue of a request's tokens; the caller marks each item as done."""
        if not self.serving:
            raise EngineDied(f"{self._name} does not serve")
        queue: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        self._streams[key] = queue
        return queue

    def close_stream(self, key: str) -> None:
        queue = self._streams.pop(key)
        while not queue.empty():
            queue.get_nowait()
            queue.task_done()

    async def wait_until_delivered(self) -> None:
        """Waits until the received tokens are appended to their requests."""
        await asyncio.gather(*(queue.join() for queue in self._streams.values()))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                self._handle_frame(json.loads(await reader.readexactly(length)))
        self._on_exit()

    def _handle_frame(self, frame: Fields) -> None:
        if "tokens" in frame:
            self.starts_without_tokens = 0
            for key, ids, log_probs, finished, cached in frame["tokens"]:
                if key in self._streams:
                    self._streams[key].put_nowait(Chunk(ids, log_probs, finished, cached))
        elif "refused" in frame:
            if (queue := self._streams.get(frame["refused"])) is not None:
                queue.put_nowait(RolloutError(f"vLLM refused the request: {frame['error']}"))
        elif "busy_s" in frame:
            if self._pong is not None and not self._pong.done():
                self._pong.set_result(frame["busy_s"])
        else:
            future = self._calls.pop(frame["call"])
            if future.done():
                return
            if "error" in frame:
                future.set_exception(RolloutError(f"{self._name}: {frame['error']}"))
            else:
                future.set_result(frame["result"])

    # -- health and end -------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Kills the process if it does not answer, or if a command or step does not end."""
        while True:
            await asyncio.sleep(_PING_INTERVAL_S)
            self._pong = asyncio.get_running_loop().create_future()
            self.send("ping")
            try:
                busy_s = await asyncio.wait_for(self._pong, _PONG_TIMEOUT_S)
            except asyncio.TimeoutError:
                log.error(
                    "%s has not answered for %.0f s; it is killed", self._name, _PONG_TIMEOUT_S
                )
                break
            limit_s = self._launch.stall_timeout_s
            if not self.serving:  # it starts, or loads all weights
                limit_s = max(limit_s, self._launch.start_timeout_s)
            if busy_s > limit_s:
                log.error("%s has spent %.0f s on one step; it is killed", self._name, busy_s)
                break
        self.kill()

    def _on_exit(self) -> None:
        """Fails all calls and streams after the process has ended."""
        self.alive = self.serving = False
        self.kill()
        reason = f"{self._name} has ended ({self._last_line()})"
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDied(reason))
        self._calls = {}
        for queue in self._streams.values():
            queue.put_nowait(EngineDied(reason))

    def kill(self) -> None:
        """Kills the process group; then `_read` ends."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Ends the process for good."""
        self._closed = True
        await self.stop()

    async def stop(self) -> None:
        """Ends the process and waits until its memory is free."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self.alive:
            self._on_exit()
        if self._writer is not None:
            self._writer.close()
        if self._child is not None:
            self.kill()
            try:
                await asyncio.to_thread(self._child.wait, _EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                log.error("%s (pid %d) does not end after SIGKILL", self._name, self.pid)
            self._child = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _last_line(self) -> str:
        """Returns the exception that ended the process, or the last line of its log."""
        assert self._folder is not None
        try:
            text = (self._folder / "log").read_text(errors="replace")
        except OSError:
            return "its log was deleted"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if _EXCEPTION.match(line)]
        return (errors or lines or ["its log is empty"])[-1]
