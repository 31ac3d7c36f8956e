"""A vLLM process: its start, its commands over a socket, its health checks and its end.

All methods run in one event loop. If the thread of that loop ends, the kernel sends SIGTERM to the vLLM
process (PR_SET_PDEATHSIG in vllm_server.py), which then ends.
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
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from hone.rollout.contract import RolloutError
from hone.rollout.owned_folder import OwnedFolder
from hone.rollout.requests import Chunk, ConnectionLost
from hone.types import Fields

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("!i")
"""The length of a frame, in the format of `multiprocessing.connection`."""
_PROGRESS_INTERVAL_S = 10.0
_PING_INTERVAL_S = 15.0
_PONG_TIMEOUT_S = 120.0
"""The longest wait for the answer to a ping; a separate thread answers, even while vLLM computes."""
_EXIT_TIMEOUT_S = 30.0
_EXCEPTION_LINE = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
_COPIED_FILES = {
    "vllm_server.py": "server.py",
    "vllm_worker.py": "hone_vllm_worker.py",
    "../ops/counter_rng.py": "hone_counter_rng.py",
}
"""Files that the process runs, with their names in its folder."""


class EngineDied(ConnectionLost):
    """The process has ended; its requests may be issued again to a new process."""


@dataclass(frozen=True)
class LaunchArguments:
    """The arguments of the start of a vLLM process."""

    python: str
    llm_arguments: Fields
    """The arguments of `vllm.LLM`."""
    environment: dict[str, str] = field(default_factory=dict)
    start_timeout_s: float = 600.0
    stall_timeout_s: float = 600.0
    """The longest duration of a command or a decode step."""
    weights: str = "auto"
    """The value of `rollout.vllm.weights`."""


class EngineProcess:
    """One vLLM engine in a child process; `start` also restarts it."""

    def __init__(self, launch: LaunchArguments, name: str = "vLLM") -> None:
        self._launch, self._name = launch, name
        self.alive = False
        self.serving = False
        """Whether the process accepts requests; `VLLMRollout` sets this once the weights are current."""
        self.starts_without_tokens = 0
        """Number of starts since the process last sent a token."""
        self.num_loaded_buckets = 0
        """Number of buckets of the current weight update that the process has loaded."""
        self.needs_weights = False
        """Whether `VLLMRollout` must send the current weights: after a restart, after a sleep that dropped
        them, or for a new adapter. At the first start, vLLM loads the model's files."""
        self._child: subprocess.Popen[bytes] | None = None
        self._folder: OwnedFolder | None = None
        self._calls: dict[int, asyncio.Future[object]] = {}  # the results of commands, by call id
        self._call_ids = count()
        self._streams: dict[str, asyncio.Queue[Chunk | Exception]] = {}  # by the key of the request
        self._tasks: list[asyncio.Task[None]] = []
        self._writer: asyncio.StreamWriter | None = None
        self._pong: asyncio.Future[float] | None = None
        """The answer to the last ping: seconds that the current command or decode step has taken."""
        self._why_dead = f"{name} is not running"
        self._closed = False

    @property
    def num_open_requests(self) -> int:
        return len(self._streams)

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    async def start(self) -> None:
        """Starts the process and waits until it can decode."""
        await self.stop()
        self.starts_without_tokens += 1
        start_time = time.monotonic()
        await self._spawn()
        launch = self._launch
        start_call = asyncio.ensure_future(
            self.call("start", engine=launch.llm_arguments, weights=launch.weights)
        )
        while not (await asyncio.wait({start_call}, timeout=_PROGRESS_INTERVAL_S))[0]:
            elapsed_s = time.monotonic() - start_time
            if elapsed_s > launch.start_timeout_s:
                last_line = self._last_log_line()
                start_call.cancel()
                await self.stop()
                raise RolloutError(
                    f"{self._name} was not ready after {elapsed_s:.0f} s (rollout.vllm.start_timeout_s); "
                    f"the last line of its log: {last_line}"
                )
            log.info("%s starts (%.0f s): %s", self._name, elapsed_s, self._last_log_line())
        version = start_call.result()
        elapsed_s = time.monotonic() - start_time
        log.info("%s %s is ready after %.0f s (pid %d)", self._name, version, elapsed_s, self.pid)

    async def _spawn(self) -> None:
        if self._closed:
            raise EngineDied(f"{self._name} was closed")
        self._folder = OwnedFolder("hone-vllm-")
        folder = self._folder.path
        source_folder = Path(__file__).parent
        for source, copy in _COPIED_FILES.items():
            shutil.copyfile(source_folder / source, folder / copy)
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "PYTHONHOME")
        }
        python_path = str(folder)
        # This interpreter may find vLLM by PYTHONPATH; another interpreter has packages of its own.
        if self._launch.python == sys.executable and os.environ.get("PYTHONPATH"):
            python_path += os.pathsep + os.environ["PYTHONPATH"]
        environment |= self._launch.environment | {"PYTHONPATH": python_path}
        parent_socket, child_socket = socket.socketpair()
        with (folder / "log").open("wb") as log_file, child_socket:
            self._child = subprocess.Popen(
                [self._launch.python, str(folder / "server.py"), str(child_socket.fileno())],
                pass_fds=[child_socket.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env=environment,
                start_new_session=True,
            )
        reader, self._writer = await asyncio.open_connection(sock=parent_socket)
        self.alive = True
        self.needs_weights, self.num_loaded_buckets = False, 0
        self._tasks = [
            asyncio.ensure_future(self._read(reader)),
            asyncio.ensure_future(self._watch()),
        ]

    # -- frames ---------------------------------------------------------------------------------

    def send(self, verb: str, **arguments: object) -> None:
        """Sends a command that has no result; does nothing if the process is dead."""
        if self.alive:
            assert self._writer is not None
            content = json.dumps({"verb": verb, **arguments}, separators=(",", ":")).encode()
            self._writer.write(_LENGTH.pack(len(content)) + content)

    async def call(self, verb: str, **arguments: object) -> object:
        """Returns the result of a command; raises RolloutError, or EngineDied if the process dies."""
        if not self.alive:
            raise EngineDied(self._why_dead)
        call_id = next(self._call_ids)
        self._calls[call_id] = asyncio.get_running_loop().create_future()
        self.send(verb, call=call_id, **arguments)
        return await self._calls[call_id]

    def open_stream(self, key: str) -> asyncio.Queue[Chunk | Exception]:
        """Returns the queue of a request's chunks; the caller calls `task_done` for each item."""
        if not self.serving:
            raise EngineDied(f"{self._name} does not accept requests")
        queue: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        self._streams[key] = queue
        return queue

    def close_stream(self, key: str) -> None:
        queue = self._streams.pop(key)
        while not queue.empty():
            queue.get_nowait()
            queue.task_done()

    async def wait_until_delivered(self) -> None:
        """Waits until all received tokens have been appended to their requests."""
        await asyncio.gather(*(queue.join() for queue in self._streams.values()))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                self._handle_frame(json.loads(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, OSError):
            pass
        except Exception:
            log.exception("%s sent a frame that hone cannot read; it is killed", self._name)
        self._on_exit()

    def _handle_frame(self, frame: Fields) -> None:
        if "tokens" in frame:
            self.starts_without_tokens = 0
            for key, ids, log_probs, finished, cached_tokens in frame["tokens"]:
                if key in self._streams:
                    self._streams[key].put_nowait(Chunk(ids, log_probs, finished, cached_tokens))
        elif "refused" in frame:
            if (queue := self._streams.get(frame["refused"])) is not None:
                queue.put_nowait(RolloutError(f"vLLM refused the request: {frame['error']}"))
        elif "busy_s" in frame:  # the answer to a ping
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
        """Kills the process if it does not answer, or if a command or decode step does not end."""
        while True:
            await asyncio.sleep(_PING_INTERVAL_S)
            if not self.alive:
                return
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
            if not self.serving:  # the process starts, or loads all weights
                limit_s = max(limit_s, self._launch.start_timeout_s)
            if busy_s > limit_s:
                log.error(
                    "%s has spent %.0f s on one command or decode step; it is killed",
                    self._name,
                    busy_s,
                )
                break
        self.kill()

    def _on_exit(self) -> None:
        """Fails all calls and streams after the process has ended."""
        self.alive = self.serving = False
        self.kill()
        self._why_dead = f"{self._name} has ended ({self._last_log_line()})"
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDied(self._why_dead))
        self._calls = {}
        for queue in self._streams.values():
            queue.put_nowait(EngineDied(self._why_dead))

    def kill(self) -> None:
        """Kills the process group, which closes the socket and so ends `_read`."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Ends the process for good: `start` raises afterwards."""
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
            self._folder.close()

    def _last_log_line(self) -> str:
        """Returns the last log line that begins with an exception, or else the last line."""
        assert self._folder is not None
        try:
            text = (self._folder.path / "log").read_text(errors="replace")
        except OSError:
            return "its log was deleted"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if _EXCEPTION_LINE.match(line)]
        return (errors or lines or ["its log is empty"])[-1]
