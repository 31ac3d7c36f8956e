"""Runs in the judge's box: forks a child per request, which runs the tests and writes the verdict.

The server itself has no tests and no program. A child serves one judgement; it receives the tests,
the program's channel and the pipe for the verdict as descriptors.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import socket
import struct
import sys
from types import FrameType
from typing import NoReturn

from hone.sandbox.judging.proxies import Session, TestNamespace, TestsFailed

REQUEST = struct.Struct("!dQ")  # seconds, bytes of memory; descriptors: channel, verdict, source
READY = b"judge ready\n"
_SERVER_FRAMES = 64  # stack frames of this file below those of the tests
_PRELOADED = "bisect copy datetime functools heapq itertools math operator random re string typing"
"""Modules that tests import most often, loaded once before any child is forked."""


class UnusableTests(Exception):
    """The tests themselves cannot run."""


def main() -> None:
    """Serves requests from standard input, which is a socket; output is discarded."""
    control = socket.socket(fileno=os.dup(0))
    null_fd = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null_fd, descriptor)
    for name in _PRELOADED.split():
        importlib.import_module(name)
    gc.freeze()
    verdicts: dict[int, int] = {}  # child pid → descriptor for its verdict

    def on_child(number: int, frame: FrameType | None) -> None:
        """Writes a verdict for each ended child; the caller reads only the first verdict."""
        while verdicts:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (verdict := verdicts.pop(pid, None)) is not None:
                code = os.waitstatus_to_exitcode(status)
                _write_verdict(verdict, False, f"the tests ended ({code})", 0)
                os.close(verdict)

    signal.signal(signal.SIGCHLD, on_child)
    control.sendall(READY)
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, REQUEST.size, 3)
        if len(data) != REQUEST.size or len(descriptors) != 3:
            os._exit(0)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        with contextlib.suppress(OSError):  # fork failed: the caller reads no verdict
            pid = os.fork()
            if pid == 0:
                _run_child(data, *descriptors)
            verdicts[pid] = os.dup(descriptors[1])
        for descriptor in descriptors:
            os.close(descriptor)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _run_child(data: bytes, channel: int, verdict: int, source: int) -> NoReturn:
    """Runs the tests in the child, writes the verdict as one line and exits."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        seconds, memory = REQUEST.unpack(data)
        signal.setitimer(signal.ITIMER_REAL, seconds)  # kills it; on_child writes the verdict
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        sources = json.loads(os.pread(source, os.fstat(source).st_size, 0))
        session = Session(channel)
        try:
            _run_tests(session, sources["preamble"], sources["tests"])
            reason = TestsFailed.reason
            _write_verdict(verdict, reason is None, reason or "", session.answers)
        except UnusableTests as error:
            _write_verdict(verdict, False, str(error), 0, usable=False)
        except BaseException as error:  # any exception of the tests fails the program
            reason = f"{type(error).__name__}: {error}"[:500]
            _write_verdict(verdict, False, reason, session.answers)
    finally:
        os._exit(0)


def _run_tests(session: Session, preamble: str, tests: str) -> None:
    namespace = TestNamespace(session, {"__name__": "__main__", "__builtins__": __builtins__})
    try:
        preamble_code = compile(preamble, "preamble.py", "exec", dont_inherit=True)
        code = compile(tests, "tests.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise UnusableTests(f"the tests do not compile: {error}") from None
    sys.setrecursionlimit(sys.getrecursionlimit() + _SERVER_FRAMES)
    try:
        exec(preamble_code, namespace)
    except Exception as error:
        raise UnusableTests(f"the tests' preamble raised {type(error).__name__}: {error}") from None
    session.shared = {
        name: value
        for name, value in namespace.items()
        if isinstance(value, type) and (value.__module__, value.__name__) == ("__main__", name)
    }
    session.wait_until_loaded()
    namespace.set_code(code)
    exec(code, namespace)


def _write_verdict(
    verdict: int, passed: bool, reason: str, answers: int, usable: bool = True
) -> None:
    line = {"passed": passed, "reason": reason, "answers": answers, "usable": usable}
    with contextlib.suppress(OSError):  # the caller has disconnected
        os.write(verdict, json.dumps(line).encode() + b"\n")
