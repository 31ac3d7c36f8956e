"""The small process that starts, watches and ends all boxes of one program.

Forking a trainer with many gigabytes and threads is slow and unsafe, so this process forks instead.
It outlives a killed trainer long enough to kill its boxes. It has a single thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import math
import os
import pickle
import resource
import selectors
import signal
import socket
import time
from collections.abc import Callable

from hone.sandbox.bind_mounts import BindMounts
from hone.sandbox.box import Box
from hone.sandbox.cgroups import remove_stale_cgroups
from hone.sandbox.plan import NOBODY, RunRequest
from hone.sandbox.privileges import as_root, lower_privileges
from hone.sandbox.result import MAX_FILES, SandboxError, SandboxResult, Status
from hone.sandbox.spares import Spares

MAX_MESSAGE = 1 << 17
DESCRIPTORS_MARK = b"+"  # the message that carries the descriptors, before the reply
_RETRY_S = 0.005  # a cgroup stays busy until its last member has exited
_LONGEST_WAIT_S = 3600.0  # the selector rejects timeouts that a timespec cannot hold
_SET_CHILD_SUBREAPER = 36


class Caller:
    """The connection to the caller of one run. A disconnect ends the run."""

    def __init__(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        self._connection = connection
        self._selector = selector
        self._unsent = memoryview(b"")
        connection.setblocking(False)

    def watch(self, box: Box) -> None:
        def on_disconnect() -> None:
            self._unwatch()
            box.kill(Status.KILLED)

        self._selector.register(self._connection, selectors.EVENT_READ, on_disconnect)

    def _unwatch(self) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._connection)

    def send_descriptors(self, descriptors: list[int]) -> None:
        """Sends a pidfd of the box's first process, which the caller kills if the warden dies, and
        the channel if the box has one."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # see on_disconnect
            socket.send_fds(self._connection, [DESCRIPTORS_MARK], descriptors)

    def answer(self, reply: SandboxResult | SandboxError) -> None:
        self._unwatch()
        self._unsent = memoryview(pickle.dumps(reply))
        self._send()

    def _send(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except BlockingIOError:
            with contextlib.suppress(KeyError):
                self._selector.register(self._connection, selectors.EVENT_WRITE, self._send)
            return
        except OSError:
            pass  # the caller has disconnected and needs no answer
        self._unwatch()
        self._connection.close()


class Warden:
    """Serves requests from one socket until it closes."""

    def __init__(self, control: socket.socket, spare_lifetime_s: float) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._boxes: dict[Box, Caller | None] = {}  # None: a discarded spare
        self._exiting: list[Box] = []  # boxes whose cgroup still has a member
        self._cleaned_parents: set[str] = set()
        self._number = 0
        self._mounts = BindMounts()
        self._spares = Spares(self._build_spare, self._discard, spare_lifetime_s)
        self._closed = False

    def serve(self) -> None:
        self._selector.register(self._control, selectors.EVENT_READ, self._on_request)
        while not (self._closed and not self._boxes and not self._exiting):
            for key, _ in self._selector.select(self._wait_s()):
                if key.fileobj in self._selector.get_map():  # an earlier event may have removed it
                    key.data()
            now = time.monotonic()
            for box in [*self._boxes]:
                box.guard(functools.partial(box.check, now))
                if box.done:
                    self._finish(box)
            self._spares.check(now)
            self._exiting = [box for box in self._exiting if not box.release()]
            self._reap()

    def _wait_s(self) -> float | None:
        due = min([box.wake_at for box in self._boxes] + [self._spares.due])
        if self._exiting:
            due = min(due, time.monotonic() + _RETRY_S)
        return None if due == math.inf else min(_LONGEST_WAIT_S, max(0.0, due - time.monotonic()))

    def _on_request(self) -> None:
        data, descriptors, flags, _ = socket.recv_fds(self._control, MAX_MESSAGE, MAX_FILES + 3)
        for descriptor in descriptors:  # recv_fds ignores MSG_CMSG_CLOEXEC
            os.set_inheritable(descriptor, False)
        if not data:
            self._closed = True
            self._selector.unregister(self._control)
            self._spares.drop()
            for running in self._boxes:
                running.kill(Status.KILLED)
            return
        if len(descriptors) < 3 or flags & socket.MSG_CTRUNC:
            for descriptor in descriptors:  # out of descriptors; the caller sees a disconnect
                os.close(descriptor)
            return
        connection, *texts = descriptors
        caller = Caller(socket.socket(fileno=connection), self._selector)
        try:
            request: RunRequest = pickle.loads(data)
            box = self._start(request, caller, *texts)
            self._boxes[box] = caller
            caller.watch(box)
        except Exception as error:  # no error of a request may end the warden
            reason = f"{type(error).__name__}: {error}"
            caller.answer(SandboxError(f"sandbox: the box could not be built: {reason}"))
            return
        finally:
            for descriptor in texts:
                os.close(descriptor)
        with contextlib.suppress(Exception):  # if this fails, the next request reports the error
            self._spares.restock(request)

    def _start(self, request: RunRequest, caller: Caller, stdin: int, *files: int) -> Box:
        parents = request.plan.cgroup
        if parents is not None and not self._cleaned_parents.issuperset(parents.unique):
            self._cleaned_parents.update(parents.unique)
            with as_root():
                remove_stale_cgroups(parents)
        spare = self._spares.take(request)
        if spare is not None:
            spare.send_to_caller = caller.send_descriptors
            with contextlib.suppress(OSError):  # the spare died while it waited
                assign = functools.partial(spare.assign, request, stdin, files[0])
                return self._kill_on_error(spare, assign)
        box, mount_points = self._new(request)
        box.send_to_caller = caller.send_descriptors
        return self._kill_on_error(box, functools.partial(box.start, stdin, [*files], mount_points))

    def _build_spare(self, request: RunRequest) -> Box:
        box, mount_points = self._new(request)
        return self._kill_on_error(box, functools.partial(box.prepare, mount_points))

    def _new(self, request: RunRequest) -> tuple[Box, dict[str, str]]:
        self._number += 1
        paths = request.plan.interpreter.read_paths if request.plan.bind_interpreter else ()
        with as_root():
            mount_points = self._mounts.bind(paths)
        return Box(request, self._number, self._selector), mount_points

    def _kill_on_error(self, box: Box, action: Callable[[], None]) -> Box:
        """Runs the action and returns the box; kills the box if the action fails."""
        try:
            action()
        except BaseException:
            box.kill(Status.KILLED)
            self._release(box)
            raise
        return box

    def _discard(self, box: Box) -> None:
        box.kill(Status.KILLED)
        self._boxes[box] = None

    def _finish(self, box: Box) -> None:
        caller = self._boxes.pop(box)
        reply = box.reply() if caller is not None else None
        self._release(box)
        if caller is not None and reply is not None:
            caller.answer(reply)

    def _release(self, box: Box) -> None:
        if not box.release():
            self._exiting.append(box)

    def _reap(self) -> None:
        """Reaps orphans of boxes, which become children of the warden, but not the boxes."""
        box_pids = {box.pid for box in self._boxes} | self._spares.pids
        while True:
            try:
                child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if child is None or child.si_pid in box_pids:
                return
            os.waitpid(child.si_pid, 0)


def main(descriptor: int, spare_lifetime_s: float) -> None:
    """Serves requests from this descriptor."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only closing the control socket ends the warden
    os.set_inheritable(descriptor, False)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.umask(0o022)
    if os.geteuid() == 0:
        lower_privileges(NOBODY)
    gc.disable()
    gc.freeze()
    Warden(socket.socket(fileno=descriptor), spare_lifetime_s).serve()
