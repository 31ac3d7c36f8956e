"""The small process that starts, watches and ends all boxes of one program.

Forking a trainer with many gigabytes and threads is slow and unsafe; forking this process is neither.
The warden also outlives a killed trainer long enough to kill its boxes. It has one thread and one loop.
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

from hone.sandbox.box import Box
from hone.sandbox.cgroups import sweep
from hone.sandbox.plan import NOBODY, Order
from hone.sandbox.result import MAX_FILES, SandboxError, SandboxResult, Status
from hone.sandbox.rights import lower, raised
from hone.sandbox.spares import Spares
from hone.sandbox.stage import Stage

MAX_MESSAGE = 1 << 17
LENT = b"+"  # sent before the reply, with the descriptors
_RETRY_S = 0.005  # a cgroup stays busy until its last member has exited
_LONGEST_WAIT_S = 3600.0  # the selector rejects timeouts that a timespec cannot hold
_SET_CHILD_SUBREAPER = 36


class Caller:
    """The connection of one run: a disconnect ends the run, the reply ends the connection."""

    def __init__(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        self._connection = connection
        self._selector = selector
        self._rest = memoryview(b"")
        connection.setblocking(False)

    def watch(self, box: Box) -> None:
        def on_hang_up() -> None:
            self._forget()
            box.kill(Status.KILLED)

        self._selector.register(self._connection, selectors.EVENT_READ, on_hang_up)

    def _forget(self) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._connection)

    def lend(self, descriptors: list[int]) -> None:
        """Send the caller descriptors of the box's first process, which it can kill if we die, and of
        the channel if the box has one."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # on_hang_up follows
            socket.send_fds(self._connection, [LENT], descriptors)

    def answer(self, reply: SandboxResult | SandboxError) -> None:
        self._forget()
        self._rest = memoryview(pickle.dumps(reply))
        self._send()

    def _send(self) -> None:
        try:
            while self._rest:
                self._rest = self._rest[self._connection.send(self._rest) :]
        except BlockingIOError:
            with contextlib.suppress(KeyError):
                self._selector.register(self._connection, selectors.EVENT_WRITE, self._send)
            return
        except OSError:
            pass  # the caller has disconnected and needs no answer
        self._forget()
        self._connection.close()


class Warden:
    """Accepts orders from one socket until it closes."""

    def __init__(self, control: socket.socket, keep_spares_s: float) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._boxes: dict[Box, Caller | None] = {}  # None: the caller needs no reply
        self._leaving: list[Box] = []
        self._swept: set[str] = set()
        self._number = 0
        self._stage = Stage()
        self._spares = Spares(self._build_spare, self._give_up, keep_spares_s)
        self._closed = False

    def serve(self) -> None:
        self._selector.register(self._control, selectors.EVENT_READ, self._on_order)
        while not (self._closed and not self._boxes and not self._leaving):
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj in self._selector.get_map():  # an earlier event may have removed it
                    key.data()
            now = time.monotonic()
            for box in [*self._boxes]:
                box.guard(functools.partial(box.check, now))
                if box.done:
                    self._finish(box)
            self._spares.check(now)
            self._leaving = [box for box in self._leaving if not box.release()]
            self._reap()

    def _patience(self) -> float | None:
        due = min([box.wake_at for box in self._boxes] + [self._spares.due])
        if self._leaving:
            due = min(due, time.monotonic() + _RETRY_S)
        return None if due == math.inf else min(_LONGEST_WAIT_S, max(0.0, due - time.monotonic()))

    def _on_order(self) -> None:
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
            order: Order = pickle.loads(data)
            box = self._start(order, caller, *texts)
            self._boxes[box] = caller
            caller.watch(box)
        except Exception as error:  # no error of an order may end the warden
            reason = f"{type(error).__name__}: {error}"
            caller.answer(SandboxError(f"sandbox: the box could not be built: {reason}"))
            return
        finally:
            for descriptor in texts:
                os.close(descriptor)
        with contextlib.suppress(Exception):  # the next order builds a box and reports errors
            self._spares.restock(order)

    def _start(self, order: Order, caller: Caller, stdin: int, *files: int) -> Box:
        parents = order.plan.cgroup
        if parents is not None and not self._swept.issuperset(parents.unique):
            self._swept.update(parents.unique)
            with raised():
                sweep(parents)
        spare = self._spares.take(order)
        if spare is not None:
            spare.lend = caller.lend
            with contextlib.suppress(OSError):  # the spare died while it waited
                hand_over = functools.partial(spare.hand_over, order, stdin, files[0])
                return self._or_abandon(spare, hand_over)
        box, staged = self._new(order)
        box.lend = caller.lend
        return self._or_abandon(box, functools.partial(box.start, stdin, [*files], staged))

    def _build_spare(self, order: Order) -> Box:
        box, staged = self._new(order)
        return self._or_abandon(box, functools.partial(box.prepare, staged))

    def _new(self, order: Order) -> tuple[Box, dict[str, str]]:
        self._number += 1
        with raised():
            staged = self._stage.bind(order.plan.interpreter.reads if order.plan.staged else ())
        return Box(order, self._number, self._selector), staged

    def _or_abandon(self, box: Box, action: Callable[[], None]) -> Box:
        """Run the action and return the box; end the box if the action fails."""
        try:
            action()
        except BaseException:
            box.kill(Status.KILLED)
            self._release(box)
            raise
        return box

    def _give_up(self, box: Box) -> None:
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
            self._leaving.append(box)

    def _reap(self) -> None:
        """Reap orphans of boxes, which become our children, but not the boxes' own processes."""
        box_pids = {box.pid for box in self._boxes} | self._spares.pids
        while True:
            try:
                child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if child is None or child.si_pid in box_pids:
                return
            os.waitpid(child.si_pid, 0)


def main(descriptor: int, keep_spares_s: float) -> None:
    """Serve orders from this descriptor."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the end of the control socket ends the warden
    os.set_inheritable(descriptor, False)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.umask(0o022)
    if os.geteuid() == 0:
        lower(NOBODY)
    gc.disable()
    gc.freeze()
    Warden(socket.socket(fileno=descriptor), keep_spares_s).serve()
