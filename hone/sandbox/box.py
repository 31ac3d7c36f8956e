"""One run from start to result, as callbacks for the warden's event loop.

A box owns and releases the run's descriptors, its cgroup and its deadline. It never blocks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable

from hone.sandbox import bubblewrap, direct, sealed, seccomp
from hone.sandbox.cgroups import Group, group_name, resident_bytes
from hone.sandbox.descriptors import Descriptors
from hone.sandbox.plan import Order
from hone.sandbox.result import NotStarted, SandboxError, SandboxResult, Status
from hone.sandbox.rights import raised
from hone.sandbox.spawn import Standard, execute, limit

SETUP_S = 30.0  # longest time from fork to the program's start
LOOK_S = 0.05  # interval between two memory checks
_CHUNK = 1 << 16
_OWN_PROCESSES = 2  # of bubblewrap: one outside the box, and the first process inside it
_OWN_MEMORY = 8 << 20


class Box(Descriptors):
    """One run: the state of its processes, limits and output."""

    def __init__(self, order: Order, number: int, selector: selectors.BaseSelector) -> None:
        super().__init__(selector)
        self.order = order
        self.pid = 0
        self.lend: Callable[[list[int]], None] | None = None  # sends them to the caller (client.py)
        self._number = number
        self._deadline = time.monotonic() + SETUP_S
        self._next_look = time.monotonic() + LOOK_S
        self._waiting = False  # True for a spare without an order
        self._limit: Status | None = None  # why the run was killed
        self._error: str | None = None
        self._output: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._events: set[str] = set()  # events that must occur before the run is done
        self._group: Group | None = None
        self._home: str | None = None
        self._status_text = b""
        self._process_fd: int | None = None
        self._init_fd: int | None = None  # the first process of the box's PID namespace
        self._init_pid = 0
        self._channel: int | None = None  # the caller's end, until it is sent
        self._gate: int | None = None
        self._report: int | None = None  # the pipe for setup errors of a child without bubblewrap
        self._empty_stdin: int | None = None  # standard input of a spare, filled later
        self._program = memoryview(b"")
        self._feed: int | None = None  # the pipe through which the program enters the box
        self._completed = False  # bubblewrap reported the program's exit code
        self._started: float | None = None
        self._ended: float | None = None
        self._exit: int | None = None

    # ---- start ----

    def start(self, stdin: int, files: list[int], staged: dict[str, str]) -> None:
        """Start the processes. staged: see Stage.bind. After an OSError, release() cleans up."""
        self._limit_group()
        stdin = self._open_channel() if self.order.channel else stdin
        if self.order.plan.bwrap is None:
            self._launch(stdin, files, staged)
        else:
            self._program = memoryview(sealed.content(files[0]))
            self._launch(stdin, [self._open_feed(), *files[1:]], staged)

    def prepare(self, staged: dict[str, str]) -> None:
        """Build a box with bubblewrap that waits for its program; `order` determines the kind of box."""
        self._limit_group()
        self._waiting, self._deadline = True, math.inf
        if self.order.channel:
            stdin = self._open_channel()
        else:
            stdin = self._empty_stdin = self._own(sealed.empty())
        self._launch(stdin, [self._open_feed()], staged)

    def hand_over(self, order: Order, stdin: int, program: int) -> None:
        """Give a waiting box its order: limits, standard input and program."""
        self._waiting = False
        self.order, self._deadline = order, time.monotonic() + SETUP_S
        self._limit_group()
        if self._empty_stdin is not None:
            sealed.fill(self._empty_stdin, stdin)
            self._close(self._empty_stdin)
        self._program = memoryview(sealed.content(program))
        if self._init_pid:
            self._open_gate()

    def _open_channel(self) -> int:
        """Creates a socket pair and returns the box's end; `_launch` closes it once the box has it."""
        ours, theirs = socket.socketpair()
        self._channel = self._own(ours.detach())
        return self._own(theirs.detach())

    def _open_feed(self) -> int:
        read, self._feed = self._pipe()
        os.set_blocking(self._feed, False)
        return read

    @property
    def ready(self) -> bool:
        """Whether the box is alive and waits for an order."""
        if not self._waiting or "process" not in self._events:
            return False
        poll = select.poll()
        for descriptor in (self._process_fd, self._init_fd):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        return not poll.poll(0)

    def _limit_group(self) -> None:
        parents, job = self.order.plan.cgroup, self.order.job
        if parents is None:
            return
        memory_bytes = (job.memory_mb << 20) + _OWN_MEMORY
        processes = job.processes + _OWN_PROCESSES
        with raised():
            if self._group is None:
                name = group_name(self._number)
                self._group = Group.create(parents, name, memory_bytes, processes)
            else:
                self._group.limit(memory_bytes, processes)

    def _launch(self, stdin: int, files: list[int], staged: dict[str, str]) -> None:
        out_read, out_write = self._pipe()
        err_read, err_write = self._pipe()
        standard = (stdin, out_write, err_write)
        if self.order.plan.bwrap is not None:
            to_close = self._spawn_bubblewrap(standard, files, staged)
        else:
            self._home = direct.make_home(self.order, files)
            self._report, report = self._pipe()
            self.pid = direct.fork(self.order, self._home, self._group, standard, report)
            self._lend()
            self._begin()
            to_close = [report]
        if self.order.channel:
            to_close.append(stdin)
        for descriptor in (out_write, err_write, *to_close):
            self._close(descriptor)
        self._watch("stdout", out_read, lambda: self._on_output("stdout", out_read))
        self._watch("stderr", err_read, lambda: self._on_output("stderr", err_read))
        self._process_fd = self._own(os.pidfd_open(self.pid))
        self._watch("process", self._process_fd, self._on_exit)

    def _spawn_bubblewrap(
        self, standard: Standard, files: list[int], staged: dict[str, str]
    ) -> list[int]:
        """Start bubblewrap and return the descriptors that only bubblewrap needs."""
        status_read, status_write = self._pipe()
        gate_read, self._gate = self._pipe()
        keep = [*files, status_write, gate_read]
        words = bubblewrap.options(self.order, staged, files)
        words += ["--json-status-fd", str(status_write), "--block-fd", str(gate_read)]
        if self.order.plan.seccomp:
            keep.append(self._memory(seccomp.build_filter()))
            words += ["--seccomp", str(keep[-1])]
        # Options are passed through a descriptor, so that the process list shows no path.
        keep.append(self._memory("\0".join(words).encode() + b"\0"))
        command = bubblewrap.command(self.order, keep[-1])
        # The environment is empty because /proc/1/environ inside the box is that of bubblewrap.
        with self._group.entered() if self._group is not None else contextlib.nullcontext():
            self.pid = execute(command, standard=standard, keep=keep)
        self._watch("status", status_read, lambda: self._on_status(status_read))
        return keep

    def _begin(self) -> None:
        self._started = time.monotonic()
        self._deadline = self._started + self.order.job.timeout_s

    # ---- events ----

    def _watch(self, event: str, descriptor: int, callback: Callable[[], None]) -> None:
        self._events.add(event)
        self._selector.register(descriptor, selectors.EVENT_READ, lambda: self.guard(callback))

    def _over(self, event: str, descriptor: int) -> None:
        self._forget(descriptor)
        self._events.discard(event)

    def _on_status(self, descriptor: int) -> None:
        """Read the pid of the box's first process, which bubblewrap blocks until the limits are set."""
        data = os.read(descriptor, _CHUNK)
        if not data:
            self._over("status", descriptor)
            return
        *lines, self._status_text = (self._status_text + data).split(b"\n")
        for line in lines:
            facts = json.loads(line)
            self._completed |= "exit-code" in facts
            pid = facts.get("child-pid")
            if pid is not None and self._gate is not None:
                self._init_fd = self._own(os.pidfd_open(pid))
                self._init_pid = pid
                if not self._waiting:
                    self._open_gate()

    def _open_gate(self) -> None:
        assert self._gate is not None
        try:
            limit(self._init_pid, self.order.job)
            if self._group is not None:
                with raised():
                    self._group.admit(self._init_pid)
            self._lend()
        except (OSError, ValueError, OverflowError) as error:
            self._fail(error)
            return
        self._begin()
        os.write(self._gate, b"x")
        self._close(self._gate)
        self._gate = None
        self._feed_program()

    def _lend(self) -> None:
        descriptors = [fd for fd in (self._init_fd, self._channel) if fd is not None]
        if self.lend is not None and descriptors:
            self.lend(descriptors)
        if self._channel is not None:
            self._close(self._channel)
            self._channel = None

    def _feed_program(self) -> None:
        """Write the program into the box after the limits are set, so a box without a warden runs nothing."""
        feed = self._feed
        assert feed is not None
        try:
            while self._program:
                self._program = self._program[os.write(feed, self._program) :]
        except BlockingIOError:
            with contextlib.suppress(KeyError):
                retry = functools.partial(self.guard, self._feed_program)
                self._selector.register(feed, selectors.EVENT_WRITE, retry)
            return
        except BrokenPipeError:
            pass  # the box has died; its exit is handled in _on_exit
        self._forget(feed)

    def _fail(self, error: Exception) -> None:
        self._error = f"{type(error).__name__}: {error}"
        self.kill()

    def _on_output(self, name: str, descriptor: int) -> None:
        data = os.read(descriptor, _CHUNK)
        if not data:
            self._over(name, descriptor)
            return
        remaining_bytes = self.order.job.output_bytes - sum(map(len, self._output.values()))
        self._output[name] += data[:remaining_bytes]
        if len(data) > remaining_bytes:
            self.kill(Status.OUTPUT)

    def _on_exit(self) -> None:
        assert self._process_fd is not None
        _, status = os.waitpid(self.pid, 0)
        self._ended = time.monotonic()
        self._exit = os.waitstatus_to_exitcode(status)
        self._over("process", self._process_fd)
        self.pid = 0 if self.order.plan.bwrap is not None else self.pid
        self._kill_all()  # the program may have left child processes
        if self._init_fd is not None:
            self._watch("namespace", self._init_fd, self._on_empty)

    def _on_empty(self) -> None:
        assert self._init_fd is not None
        self._over("namespace", self._init_fd)
        self._init_fd = None

    # ---- limits ----

    def check(self, now: float) -> None:
        """Enforce the deadline and the limit on total memory."""
        if now < self.wake_at:
            return
        if now >= self._deadline:
            if self._started is None:
                self._error = f"it was not ready after {SETUP_S:.0f} s"
            self.kill(Status.TIMEOUT)
            return
        self._next_look = now + LOOK_S
        # If the kernel kills one process for memory, the run ends: the others would wait for it.
        if self._group is not None and "memory" in self._group.directories:
            over_limit = self._group.out_of_memory()
        else:
            resident = resident_bytes(self._init_pid) if self._init_pid else 0
            over_limit = resident > self.order.job.memory_mb << 20
        if over_limit:
            self.kill(Status.MEMORY)

    @property
    def wake_at(self) -> float:
        """The time at which check() is due; infinity for a box that is already ending."""
        if self._limit is not None or self._ended is not None:
            return math.inf
        return min(self._deadline, self._next_look)

    def kill(self, limit: Status | None = None) -> None:
        self._limit = self._limit or limit
        self._kill_all()
        if self.pid and "process" in self._events:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _kill_all(self) -> None:
        if self._init_fd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init_fd, signal.SIGKILL)
        if self.order.plan.bwrap is None and self.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        if self._group is not None:
            with raised():
                self._group.kill()

    # ---- end ----

    @property
    def done(self) -> bool:
        return not self._events

    def reply(self) -> SandboxResult | SandboxError:
        """Returns the result, or the error of the box."""
        stdout, stderr = (bytes(self._output[name]) for name in ("stdout", "stderr"))
        if self._error is None and self._limit is None:
            self._error = self._setup_error(stderr)
        if self._error:
            killed_early = self._started is None and self._exit is not None and self._exit < 0
            kind = NotStarted if killed_early else SandboxError
            return kind(f"sandbox: the box could not be built: {self._error}")
        code = None if self._limit is not None else self._exit
        code = 128 - code if code is not None and code < 0 else code
        started = self._started or 0.0
        return SandboxResult(
            status=self._status(code, stderr),
            exit_code=code,
            stdout=stdout.decode(errors="replace"),
            stderr=stderr.decode(errors="replace"),
            wall_s=(self._ended or started) - started,
        )

    def _status(self, code: int | None, stderr: bytes) -> Status:
        if self._group is not None and self._group.out_of_memory():
            return Status.MEMORY
        if self._limit is not None:
            return self._limit
        if code == 0:
            return Status.OK
        if code == 128 + signal.SIGXCPU:
            return Status.TIMEOUT
        if code in (None, 128 + signal.SIGKILL, 128 + signal.SIGTERM):
            return Status.KILLED
        last_line = stderr.rstrip().rpartition(b"\n")[2]
        return Status.MEMORY if last_line.startswith(b"MemoryError") else Status.ERROR

    def _setup_error(self, stderr: bytes) -> str | None:
        """Returns the reason why the program did not start, or None if it started."""
        if self._report is not None:  # without bubblewrap, the child reports errors before exec
            return os.read(self._report, _CHUNK).decode(errors="replace").strip() or None
        if self._started is not None and (self._completed or (self._exit or 0) <= 0):
            return None
        return stderr.decode(errors="replace") or f"exit {self._exit}"

    def release(self) -> bool:
        """Free all resources. Returns False while the cgroup still has a member that is exiting."""
        for descriptor in list(self._fds):
            self._forget(descriptor)
        if self._home is not None:
            direct.remove_home(self._home)
            self._home = None
        with raised():
            return self._group is None or self._group.remove()
