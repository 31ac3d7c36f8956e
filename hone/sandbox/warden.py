"""The warden: a small process with one thread that starts, watches and ends all boxes of its client.

A trainer has much memory and many threads, so that a fork is slow and unsafe; the warden forks instead.
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
from collections.abc import Iterator

from hone.sandbox.box import Box
from hone.sandbox.cgroups import remove_stale_cgroups
from hone.sandbox.interpreter import BindMounts
from hone.sandbox.plan import NOBODY, BoxPlan, RunRequest
from hone.sandbox.processes import as_root, lower_privileges
from hone.sandbox.result import MAX_FILES, SandboxError, SandboxResult, Status

MAX_MESSAGE_BYTES = 1 << 17
SPARE_LIFETIME_S = 1.0  # time after the last request at which the spare is discarded
DESCRIPTORS_MARK = b"+"  # the data of a message with descriptors, which precedes the reply
_CGROUP_RETRY_S = 0.005  # a cgroup stays busy until its last member has exited
_MAX_WAIT_S = 3600.0  # the selector rejects very long timeouts
_SET_CHILD_SUBREAPER = 36

SpareKind = tuple[BoxPlan, int, bool]  # plan, disk_mb, has_channel


class CallerConnection:
    """The connection to the caller of one run."""

    def __init__(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        self._connection = connection
        self._selector = selector
        self._unsent_reply = memoryview(b"")
        connection.setblocking(False)

    def kill_on_disconnect(self, box: Box) -> None:
        def on_disconnect() -> None:
            self._unwatch()
            box.kill(Status.KILLED)

        self._selector.register(self._connection, selectors.EVENT_READ, on_disconnect)

    def _unwatch(self) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._connection)

    def send_descriptors(self, descriptors: list[int]) -> None:
        """Sends the channel of the box, and a pidfd for the case that the warden dies."""
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # on_disconnect ends the run
            socket.send_fds(self._connection, [DESCRIPTORS_MARK], descriptors)

    def send_reply(self, reply: SandboxResult | SandboxError) -> None:
        self._unwatch()
        self._unsent_reply = memoryview(pickle.dumps(reply))
        self._send()

    def _send(self) -> None:
        try:
            while self._unsent_reply:
                self._unsent_reply = self._unsent_reply[self._connection.send(self._unsent_reply) :]
        except BlockingIOError:
            with contextlib.suppress(KeyError):
                self._selector.register(self._connection, selectors.EVENT_WRITE, self._send)
            return
        except OSError:
            pass  # the caller has disconnected
        self._unwatch()
        self._connection.close()


class Warden:
    """Serves requests from the control socket until the socket closes, and then kills its boxes.

    The warden has at most one spare, which is built after two requests of the same kind in a row. Like every
    box, a spare is used once; it has no data before its request arrives.
    """

    def __init__(self, control: socket.socket, spare_lifetime_s: float) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._boxes: dict[Box, CallerConnection | None] = {}  # None: a discarded spare
        self._exiting: list[Box] = []  # boxes whose cgroup still has a member
        self._cleaned_parents: set[str] = set()
        self._last_box_id = 0
        self._mounts = BindMounts()
        self._is_control_closed = False
        self._spare: Box | None = None
        self._spare_lifetime_s = spare_lifetime_s
        self._last_kind: SpareKind | None = None
        self._last_request_time = -math.inf

    def serve(self) -> None:
        self._selector.register(self._control, selectors.EVENT_READ, self._on_request)
        while not (self._is_control_closed and not self._boxes and not self._exiting):
            for key, _ in self._selector.select(self._wait_s()):
                if (
                    key.fileobj in self._selector.get_map()
                ):  # unless an earlier event removed the key
                    key.data()
            now = time.monotonic()
            for box in [*self._boxes]:
                box.guard(functools.partial(box.check, now))
                if box.is_done:
                    self._finish(box)
            if self._spare is not None:
                is_expired = now >= self._last_request_time + self._spare_lifetime_s
                if is_expired or not self._spare.is_live_spare:
                    self._discard_spare()
            self._exiting = [box for box in self._exiting if not box.release()]
            self._reap()

    def _wait_s(self) -> float | None:
        """Returns the time to wait for an event; None waits without a limit."""
        wake_times = [box.wake_at for box in self._boxes]
        if self._spare is not None:
            wake_times.append(self._last_request_time + self._spare_lifetime_s)
        if self._exiting:
            wake_times.append(time.monotonic() + _CGROUP_RETRY_S)
        wake_time = min(wake_times, default=math.inf)
        if wake_time == math.inf:
            return None
        return min(_MAX_WAIT_S, max(0.0, wake_time - time.monotonic()))

    def _on_request(self) -> None:
        data, descriptors, flags, _ = socket.recv_fds(
            self._control, MAX_MESSAGE_BYTES, MAX_FILES + 3
        )
        for descriptor in descriptors:  # recv_fds ignores MSG_CMSG_CLOEXEC
            os.set_inheritable(descriptor, False)
        if not data:
            self._is_control_closed = True
            self._selector.unregister(self._control)
            self._discard_spare()
            for box in self._boxes:
                box.kill(Status.KILLED)
            return
        if len(descriptors) < 3 or flags & socket.MSG_CTRUNC:
            for descriptor in descriptors:  # too many files are open; the caller sees a disconnect
                os.close(descriptor)
            return
        connection_fd, *text_fds = descriptors
        caller = CallerConnection(socket.socket(fileno=connection_fd), self._selector)
        try:
            request: RunRequest = pickle.loads(data)
            box = self._start(request, caller, *text_fds)
            self._boxes[box] = caller
            caller.kill_on_disconnect(box)
        except Exception as error:  # no error of a request may end the warden
            reason = f"{type(error).__name__}: {error}"
            caller.send_reply(SandboxError(f"sandbox: the box could not be built: {reason}"))
            return
        finally:
            for descriptor in text_fds:
                os.close(descriptor)
        with contextlib.suppress(Exception):  # the next request reports the error
            self._restock(request)

    def _start(
        self, request: RunRequest, caller: CallerConnection, stdin_fd: int, *file_fds: int
    ) -> Box:
        parents = request.plan.parent_cgroups
        if parents is not None and not self._cleaned_parents.issuperset(parents.unique_directories):
            self._cleaned_parents.update(parents.unique_directories)
            with as_root():
                remove_stale_cgroups(parents)
        spare = self._spare
        if spare is not None and spare.is_live_spare and _kind(request) == _kind(spare.request):
            self._spare = None
            spare.send_to_caller = caller.send_descriptors
            with contextlib.suppress(OSError), self._kill_on_error(spare):
                spare.assign(request, stdin_fd, file_fds[0])
                return spare
            # The spare died while it waited.
        box, mount_points = self._create_box(request)
        box.send_to_caller = caller.send_descriptors
        with self._kill_on_error(box):
            box.start(stdin_fd, [*file_fds], mount_points)
        return box

    def _restock(self, request: RunRequest) -> None:
        """Builds a spare if this request has the kind of the last request, and the last request is recent."""
        kind, now = _kind(request), time.monotonic()
        is_recent = now - self._last_request_time <= self._spare_lifetime_s
        is_repeated = kind is not None and kind == self._last_kind and is_recent
        self._last_kind, self._last_request_time = kind, now
        if not is_repeated:
            return
        if self._spare is not None and _kind(self._spare.request) != kind:
            self._discard_spare()
        if self._spare is None:
            box, mount_points = self._create_box(request)
            with self._kill_on_error(box):
                box.prepare(mount_points)
            self._spare = box

    def _create_box(self, request: RunRequest) -> tuple[Box, dict[str, str]]:
        self._last_box_id += 1
        paths = request.plan.interpreter.read_paths if request.plan.bind_interpreter else ()
        with as_root():
            mount_points = self._mounts.bind(paths)
        return Box(request, self._last_box_id, self._selector), mount_points

    @contextlib.contextmanager
    def _kill_on_error(self, box: Box) -> Iterator[None]:
        """Kills the box if the `with` block raises."""
        try:
            yield
        except BaseException:
            box.kill(Status.KILLED)
            self._release(box)
            raise

    def _discard_spare(self) -> None:
        if self._spare is not None:
            self._spare.kill(Status.KILLED)
            self._boxes[self._spare] = None
            self._spare = None

    def _finish(self, box: Box) -> None:
        caller = self._boxes.pop(box)
        reply = box.reply() if caller is not None else None
        self._release(box)
        if caller is not None and reply is not None:
            caller.send_reply(reply)

    def _release(self, box: Box) -> None:
        if not box.release():
            self._exiting.append(box)

    def _reap(self) -> None:
        """Reaps the orphans of boxes, which became children of the warden, but not the boxes."""
        box_pids = {box.pid for box in (*self._boxes, self._spare) if box is not None}
        while True:
            try:
                child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if child is None or child.si_pid in box_pids:
                return
            os.waitpid(child.si_pid, 0)


def _kind(request: RunRequest) -> SpareKind | None:
    """Returns the values that a spare and its request share; None if the request needs a new box."""
    # Arguments, and files other than the program, are fixed when a box is built.
    fits_spare = (
        request.plan.bwrap_path is not None and not request.job.argv and not request.job.files
    )
    return (request.plan, request.job.disk_mb, request.has_channel) if fits_spare else None


def main(control_fd: int, guard_fd: int, spare_lifetime_s: float) -> None:
    """Runs the warden: serves requests until the control socket closes.

    `guard_fd` stays open until the warden ends, which the guard sees.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the end of the control socket ends the warden
    for descriptor in (control_fd, guard_fd):
        os.set_inheritable(descriptor, False)
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.umask(0o022)
    if os.geteuid() == 0:
        lower_privileges(NOBODY)
    gc.disable()
    gc.freeze()
    Warden(socket.socket(fileno=control_fd), spare_lifetime_s).serve()
