"""The server in the judge's box: for each request, a child runs the tests and writes the verdict."""

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

from hone.sandbox.judging.program_names import names_used_together
from hone.sandbox.judging.proxies import Session, TestNamespace, TestsFailed

REQUEST_STRUCT = struct.Struct("!dQ")  # timeout_s, memory_bytes
READY_MESSAGE = b"judge ready\n"
_SERVER_FRAMES = 64  # stack frames of this file, by which the recursion limit is raised
_PRELOADED_MODULES = (
    "bisect copy datetime functools heapq itertools math operator random re string typing"
)
"""Modules that tests often import; the server imports them once for all children."""


class UnusableTests(Exception):
    """The tests themselves cannot run."""


def main() -> None:
    """Serves requests from standard input, which is a socket, and discards all output."""
    control = socket.socket(fileno=os.dup(0))
    null_fd = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null_fd, descriptor)
    for name in _PRELOADED_MODULES.split():
        importlib.import_module(name)
    gc.freeze()
    verdict_fds: dict[int, int] = {}  # by the pid of the child

    def on_child_exit(number: int, frame: FrameType | None) -> None:
        """Writes a failure for each child that ended; the caller ignores it after a verdict of the child."""
        while verdict_fds:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            verdict_fd = verdict_fds.pop(pid, None)
            if verdict_fd is not None:
                exit_code = os.waitstatus_to_exitcode(status)
                reason = f"the tests ended with exit code {exit_code}"
                _write_verdict(verdict_fd, False, reason, 0)
                os.close(verdict_fd)

    signal.signal(signal.SIGCHLD, on_child_exit)
    control.sendall(READY_MESSAGE)
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, REQUEST_STRUCT.size, 3)
        if len(data) != REQUEST_STRUCT.size or len(descriptors) != 3:
            os._exit(0)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        with contextlib.suppress(OSError):  # if the fork fails, the caller sees a disconnect
            pid = os.fork()
            if pid == 0:
                _run_child(data, *descriptors)
            verdict_fds[pid] = os.dup(descriptors[1])
        for descriptor in descriptors:
            os.close(descriptor)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _run_child(request: bytes, channel_fd: int, verdict_fd: int, sources_fd: int) -> NoReturn:
    """Runs the tests in the child, writes the verdict as one line and exits."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        timeout_s, memory_bytes = REQUEST_STRUCT.unpack(request)
        # SIGALRM kills this child, and `on_child_exit` writes the verdict.
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        sources = json.loads(os.pread(sources_fd, os.fstat(sources_fd).st_size, 0))
        session = Session(channel_fd)
        try:
            _run_tests(session, sources["preamble"], sources["tests"])
            reason = TestsFailed.reason
            _write_verdict(verdict_fd, reason is None, reason or "", session.num_plain_answers)
        except UnusableTests as error:
            _write_verdict(verdict_fd, False, str(error), 0, usable=False)
        except BaseException as error:  # the tests fail with any exception, also SystemExit
            reason = f"{type(error).__name__}: {error}"[:500]
            _write_verdict(verdict_fd, False, reason, session.num_plain_answers)
    finally:
        os._exit(0)


def _run_tests(session: Session, preamble: str, tests: str) -> None:
    namespace = TestNamespace(session, {"__name__": "__main__", "__builtins__": __builtins__})
    try:
        preamble_code = compile(preamble, "preamble.py", "exec", dont_inherit=True)
        tests_code = compile(tests, "tests.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise UnusableTests(f"the tests do not compile: {error}") from None
    sys.setrecursionlimit(sys.getrecursionlimit() + _SERVER_FRAMES)
    try:
        exec(preamble_code, namespace)
    except Exception as error:
        raise UnusableTests(f"the tests' preamble raised {type(error).__name__}: {error}") from None
    session.shared_classes = {
        name: value
        for name, value in namespace.items()
        if isinstance(value, type) and (value.__module__, value.__name__) == ("__main__", name)
    }
    if names := names_used_together(tests, namespace):
        raise UnusableTests(
            f"they use {' and '.join(names)} together and define neither; only one can be a function of the "
            "program, so define or import the others"
        )
    session.wait_until_loaded()
    namespace.set_code(tests_code)
    exec(tests_code, namespace)


def _write_verdict(
    verdict_fd: int, passed: bool, reason: str, answers: int, usable: bool = True
) -> None:
    verdict = {"passed": passed, "reason": reason, "answers": answers, "usable": usable}
    with contextlib.suppress(OSError):  # the caller has disconnected
        os.write(verdict_fd, json.dumps(verdict).encode() + b"\n")
