"""Starts the box of a program, and sends the tests to the judge's box, which runs the tests.

A process has one judge's box per plan; a separate child in the box runs each judgement. If the box ends, a
new box repeats the judgements.
"""

from __future__ import annotations

import contextlib
import functools
import json
import marshal
import os
import socket
import sys
import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from hone.sandbox.client import Run, wait_for_data
from hone.sandbox.descriptors import write_sealed
from hone.sandbox.judging.judge_server import READY_MESSAGE, REQUEST_STRUCT
from hone.sandbox.layers import DEFAULT_MINIMUM, box_plan_for
from hone.sandbox.plan import BoxPlan
from hone.sandbox.result import MAX_TIMEOUT_S, Job, SandboxError

_FOLDER = Path(__file__).parent
_MAX_CONCURRENT = 8  # judgements in the judge's box
_CHILD_MEMORY_MB = 1024  # address space of one judgement
_START_TIMEOUT_S = 30.0
_GRACE_S = 2.0  # for the end of the tests, after the time limit of the program
_MAX_ATTEMPTS = 3


@dataclass(frozen=True)
class Judgement:
    """The outcome of the tests."""

    passed: bool
    reason: str
    """Why the tests failed. Only for logs, because the program can influence this text."""
    answers: int
    """Number of plain values that the program sent to the tests; 0 for tests that call nothing."""
    usable: bool = True
    """False if the tests cannot run, whatever the program."""


class JudgeBoxLost(SandboxError):
    """The judge's box ended before its verdict."""


def judge(
    program: str,
    tests: str,
    *,
    preamble: str = "",
    timeout_s: float = 10.0,
    memory_mb: int = 512,
    minimum: Collection[str] = DEFAULT_MINIMUM,
    interpreter: str | None = None,
    caller_socket: socket.socket | None = None,
) -> Judgement:
    """Runs `tests` (Python source) against `program`; both boxes run `preamble` first.

    Raises SandboxError if a box fails; a failure of the program is a Judgement. The run ends if
    `caller_socket` closes.
    """
    plan = box_plan_for(minimum, interpreter)
    start_code = (
        f"exec({_program_server_expression()}, _ := {{'__name__': 'program_server'}})\n"
        f"_['main']({program!r}, {preamble!r})\n"
    )
    job = Job(start_code, timeout_s=timeout_s, memory_mb=memory_mb)
    sources_json = json.dumps({"preamble": preamble, "tests": tests})
    for _ in range(_MAX_ATTEMPTS - 1):
        with contextlib.suppress(JudgeBoxLost):
            return _judge_once(job, plan, sources_json, caller_socket)
    return _judge_once(job, plan, sources_json, caller_socket)


def _judge_once(
    job: Job, plan: BoxPlan, sources_json: str, caller_socket: socket.socket | None
) -> Judgement:
    with _judge_boxes_lock:  # the pid is a part of the key, because a fork needs its own box
        box = _judge_boxes.setdefault((os.getpid(), repr(plan)), JudgeBox(plan))
    box.start()  # before the time of the program starts
    with box.slots, Run(job, plan, has_channel=True, caller_socket=caller_socket) as run:
        channel_fd = run.take_channel()
        verdict_socket, judge_socket = socket.socketpair()
        sources_fd = write_sealed(sources_json)
        try:
            box.send_request(job.timeout_s, [channel_fd, judge_socket.fileno(), sources_fd])
        finally:
            judge_socket.close()
            os.close(channel_fd)
            os.close(sources_fd)
        data = b""
        with verdict_socket:
            while b"\n" not in data:
                try:
                    timeout_s = job.timeout_s + 2 * _GRACE_S + _START_TIMEOUT_S
                    wait_for_data(verdict_socket, timeout_s, caller_socket)
                    chunk = verdict_socket.recv(1 << 16)
                except (TimeoutError, ConnectionResetError):
                    chunk = b""
                if not chunk:
                    box.close()
                    raise JudgeBoxLost("sandbox: the judge's box ended before its verdict")
                data += chunk
        return Judgement(**json.loads(data.partition(b"\n")[0]))


class JudgeBox:
    """The judge's box of a plan, which starts on first use."""

    def __init__(self, plan: BoxPlan) -> None:
        self.slots = threading.BoundedSemaphore(_MAX_CONCURRENT)
        self._plan = plan
        self._lock = threading.RLock()
        self._run: Run | None = None
        self._control_socket: socket.socket | None = None

    def start(self) -> socket.socket:
        """Starts the box if it does not run yet, and returns the control socket."""
        with self._lock:
            if self._control_socket is not None:
                return self._control_socket
            job = Job(
                "from hone.sandbox.judging.judge_server import main\nmain()\n",
                timeout_s=MAX_TIMEOUT_S,
                cpu_s=MAX_TIMEOUT_S,
                memory_mb=_CHILD_MEMORY_MB * (_MAX_CONCURRENT + 1),
                processes=4 * _MAX_CONCURRENT,
                files=_judge_files(),
            )
            self._run = Run(job, self._plan, has_channel=True)
            self._control_socket = socket.socket(fileno=self._run.take_channel())
            self._control_socket.settimeout(_START_TIMEOUT_S)
            try:
                if self._control_socket.recv(len(READY_MESSAGE)) != READY_MESSAGE:
                    self._run.result()  # raises if the box itself failed
                    raise JudgeBoxLost("sandbox: the judge's box did not start")
            except BaseException as error:
                self.close()
                if isinstance(error, TimeoutError):
                    message = f"sandbox: the judge's box was not ready in {_START_TIMEOUT_S} s"
                    raise JudgeBoxLost(message) from error
                raise
            return self._control_socket

    def send_request(self, timeout_s: float, descriptors: list[int]) -> None:
        """Sends a request with the descriptors of the channel, the verdict socket and the sources."""
        message = REQUEST_STRUCT.pack(timeout_s + _GRACE_S, _CHILD_MEMORY_MB << 20)
        with self._lock:
            try:
                socket.send_fds(self.start(), [message], descriptors)
            except (BrokenPipeError, ConnectionResetError) as error:
                self.close()
                raise JudgeBoxLost("sandbox: the judge's box has ended") from error

    def close(self) -> None:
        """Ends the box; the next judgement starts a new box."""
        with self._lock:
            if self._control_socket is not None:
                self._control_socket.close()
            if self._run is not None:
                self._run.close()
            self._control_socket = self._run = None


_judge_boxes: dict[tuple[int, str], JudgeBox] = {}
_judge_boxes_lock = threading.Lock()


@functools.lru_cache(maxsize=1)
def _judge_files() -> dict[str, str]:
    """Returns the files of the judge's box by path: the modules of the server in empty packages."""
    packages = ("hone/__init__.py", "hone/sandbox/__init__.py", "hone/sandbox/judging/__init__.py")
    modules = {
        f"hone/sandbox/judging/{name}.py": (_FOLDER / f"{name}.py").read_text()
        for name in ("plain_data", "proxies", "program_names", "judge_server")
    }
    return {**dict.fromkeys(packages, ""), **modules}


@functools.lru_cache(maxsize=1)
def _program_server_expression() -> str:
    """Returns a Python expression for the code object of program_server.py.

    A box with this version of Python loads the compiled code; another version compiles the source.
    """
    source = (_FOLDER / "program_server.py").read_text()
    compiled = marshal.dumps(compile(source, "program_server.py", "exec", dont_inherit=True))
    return (
        f"__import__('marshal').loads({compiled!r}) if __import__('sys').hexversion =="
        f" {sys.hexversion} else compile({source!r}, 'program_server.py', 'exec')"
    )
