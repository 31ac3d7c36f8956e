"""The client of judging: starts the program's box, and lets the judge's box run the tests.

Each process has one judge's box, which runs every judgement in a separate child. If that box is
lost, it is replaced and the judgement is repeated. The program's box is used once.
"""

from __future__ import annotations

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

from hone.sandbox import memfd
from hone.sandbox.client import Run, wait_for
from hone.sandbox.judging.judge_server import READY, REQUEST
from hone.sandbox.layers import DEFAULT_MINIMUM, plan_for
from hone.sandbox.plan import Plan
from hone.sandbox.result import MAX_TIMEOUT_S, Job, SandboxError

_HERE = Path(__file__).parent
_MAX_CONCURRENT = 8
_CHILD_MEMORY_MB = 1024  # address space of one judgement
_START_S, _GRACE_S = 30.0, 2.0
_ATTEMPTS = 3


@dataclass(frozen=True)
class Judgement:
    """The outcome of the tests."""

    passed: bool
    reason: str
    """Why the tests failed, in a sentence; only for logs, because the program can influence it."""
    answers: int
    """Number of plain values that the tests received from the program; 0 if they called nothing."""
    usable: bool = True
    """False if the tests cannot run with any program."""


class JudgeLost(SandboxError):
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
    caller: socket.socket | None = None,
) -> Judgement:
    """Runs `tests` (Python source) against `program`; the preamble runs before both, in both boxes.

    Raises SandboxError if a box failed, not the program. caller: the run ends if it disconnects.
    """
    plan = plan_for(minimum, interpreter)
    start_code = (
        f"exec({_program_server()}, _ := {{'__name__': 'program_server'}})\n"
        f"_['main']({program!r}, {preamble!r})\n"
    )
    job = Job(start_code, timeout_s=timeout_s, memory_mb=memory_mb)
    sources = json.dumps({"preamble": preamble, "tests": tests})
    for _ in range(_ATTEMPTS - 1):
        try:
            return _judge_once(job, plan, sources, caller)
        except JudgeLost:
            pass
    return _judge_once(job, plan, sources, caller)


def _judge_once(job: Job, plan: Plan, sources: str, caller: socket.socket | None) -> Judgement:
    with _boxes_lock:  # one box per plan and process: a fork must not share its parent's box
        box = _boxes.setdefault((os.getpid(), repr(plan)), JudgeBox(plan))
    box.start()  # before the program's time limit starts
    with box.slots, Run(job, plan, channel=True, caller=caller) as run:
        channel = run.channel()
        ours, theirs = socket.socketpair()
        source = memfd.write_sealed(sources)
        try:
            box.send(job.timeout_s, [channel, theirs.fileno(), source])
        finally:
            theirs.close()
            os.close(channel)
            os.close(source)
        data = b""
        with ours:
            while b"\n" not in data:
                try:
                    wait_for(ours, job.timeout_s + 2 * _GRACE_S + _START_S, caller)
                    part = ours.recv(1 << 16)
                except (TimeoutError, ConnectionResetError):
                    part = b""
                if not part:
                    box.drop()
                    raise JudgeLost("sandbox: the judge's box ended before its verdict")
                data += part
        return Judgement(**json.loads(data.partition(b"\n")[0]))


class JudgeBox:
    """The judge's box of this process, started on first use."""

    def __init__(self, plan: Plan) -> None:
        self.slots = threading.BoundedSemaphore(_MAX_CONCURRENT)
        self._plan = plan
        self._lock = threading.RLock()
        self._run: Run | None = None
        self._control: socket.socket | None = None

    def start(self) -> socket.socket:
        with self._lock:
            if self._control is not None:
                return self._control
            job = Job(
                "from hone.sandbox.judging.judge_server import main\nmain()\n",
                timeout_s=MAX_TIMEOUT_S,
                cpu_s=MAX_TIMEOUT_S,
                memory_mb=_CHILD_MEMORY_MB * (_MAX_CONCURRENT + 1),
                processes=4 * _MAX_CONCURRENT,
                files=_judge_files(),
            )
            self._run = Run(job, self._plan, channel=True)
            self._control = socket.socket(fileno=self._run.channel())
            self._control.settimeout(_START_S)
            try:
                if self._control.recv(len(READY)) != READY:
                    self._run.result()  # raises if the box itself failed
                    raise JudgeLost("sandbox: the judge's box did not start")
            except TimeoutError as error:
                self.drop()
                raise JudgeLost(
                    f"sandbox: the judge's box was not ready in {_START_S} s"
                ) from error
            except BaseException:
                self.drop()
                raise
            return self._control

    def send(self, timeout_s: float, descriptors: list[int]) -> None:
        message = REQUEST.pack(timeout_s + _GRACE_S, _CHILD_MEMORY_MB << 20)
        with self._lock:
            try:
                socket.send_fds(self.start(), [message], descriptors)
            except (BrokenPipeError, ConnectionResetError) as error:
                self.drop()
                raise JudgeLost("sandbox: the judge's box has ended") from error

    def drop(self) -> None:
        """Ends the box; the next judgement starts a new one."""
        with self._lock:
            if self._control is not None:
                self._control.close()
            if self._run is not None:
                self._run.close()
            self._control = self._run = None


_boxes: dict[tuple[int, str], JudgeBox] = {}
_boxes_lock = threading.Lock()


@functools.lru_cache(maxsize=1)
def _judge_files() -> dict[str, str]:
    packages = ("hone/__init__.py", "hone/sandbox/__init__.py", "hone/sandbox/judging/__init__.py")
    modules = {
        f"hone/sandbox/judging/{name}.py": (_HERE / f"{name}.py").read_text()
        for name in ("plain_data", "proxies", "judge_server")
    }
    return {**dict.fromkeys(packages, ""), **modules}


@functools.lru_cache(maxsize=1)
def _program_server() -> str:
    """Returns an expression for the code of program_server.py, compiled if the versions match."""
    source = (_HERE / "program_server.py").read_text()
    compiled = marshal.dumps(compile(source, "program_server.py", "exec", dont_inherit=True))
    return (
        f"__import__('marshal').loads({compiled!r}) if __import__('sys').hexversion =="
        f" {sys.hexversion} else compile({source!r}, 'program_server.py', 'exec')"
    )
