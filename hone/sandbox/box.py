"""One run from start to verdict, as a few callbacks the warden's loop calls.

Owns the run's descriptors, its cgroup and its deadline; gives all of them back. Never blocks.
"""

from __future__ import annotations

import contextlib
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
from hone.sandbox.cgroups import Group, group_name
from hone.sandbox.descriptors import Descriptors
from hone.sandbox.ending import Ending
from hone.sandbox.plan import Order, box_environment
from hone.sandbox.resident import resident_bytes
from hone.sandbox.result import Reply, Status
from hone.sandbox.rights import raised
from hone.sandbox.spawn import Standard, execute, fork, limit

SETUP_S = 30.0  # longest time from fork to the program's start
LOOK_S = 0.05  # how often a box's memory is looked at
_CHUNK = 1 << 16
_OWN_PROCESSES = 2  # bubblewrap's: one outside the box, one that is the first inside
_OWN_MEMORY = 8 << 20


class Box(Descriptors):
    """A program that runs, or is about to."""

    def __init__(self, order: Order, number: int, selector: selectors.BaseSelector) -> None:
        super().__init__(selector)
        self.order = order
        self.pid = 0
        self._process_fd: int | None = None
        self.init_fd: int | None = None  # the first process of the box's PID namespace
        self.deadline = time.monotonic() + SETUP_S
        self._next_look = time.monotonic() + LOOK_S
        self.lend: Callable[[list[int]], None] | None = None  # to the caller, see client.py
        self._channel: int | None = None  # the caller's end, until it is lent
        self._waiting = False  # a spare: it has no order yet
        self.verdict: Status | None = None
        self.error: str | None = None
        self.output: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._number = number
        self._group: Group | None = None
        self._home: str | None = None
        self._open: set[str] = set()
        self._status_text = b""
        self._gate: int | None = None
        self._report: int | None = None  # where a child without bubblewrap says what failed
        self._held: int | None = None  # stdin of a spare, to be filled
        self._program = memoryview(b"")
        self._feed: int | None = None  # where the program goes in
        self._completed = False  # bubblewrap saw the program itself end
        self._init_pid = 0
        self._started: float | None = None
        self._ended: float | None = None
        self._exit: int | None = None

    # ---- start ----

    def start(self, stdin: int, files: list[int], staged: dict[str, str]) -> None:
        """Fork. staged: see Stage.bind. OSError leaves nothing behind but what release() takes away."""
        self._limit_group()
        stdin = self._open_channel() if self.order.channel else stdin
        if self.order.plan.bwrap is None:
            self._launch(stdin, files, staged)
        else:
            self._program = memoryview(sealed.content(files[0]))
            self._launch(stdin, [self._open_feed(), *files[1:]], staged)

    def prepare(self, staged: dict[str, str]) -> None:
        """Build a box that waits for its program; order says which kind. bubblewrap only."""
        self._limit_group()
        self._waiting, self.deadline = True, math.inf
        if self.order.channel:
            stdin = self._open_channel()
        else:
            stdin = self._held = self._own(sealed.empty())
        self._launch(stdin, [self._open_feed()], staged)

    def hand_over(self, order: Order, stdin: int, program: int) -> None:
        """Give a waiting box its order; what it sees is what a box built for it alone would see."""
        assert self._waiting
        self._waiting = False
        self.order, self.deadline = order, time.monotonic() + SETUP_S
        self._limit_group()
        if self._held is not None:
            sealed.fill(self._held, stdin)
            self._close(self._held)
            self._held = None
        self._program = memoryview(sealed.content(program))
        if self._init_pid:
            self._open_gate()

    def _open_channel(self) -> int:
        """The box's end; it is closed here as soon as the box has it."""
        ours, theirs = socket.socketpair()
        self._channel = self._own(ours.detach())
        return self._own(theirs.detach())

    def _open_feed(self) -> int:
        read, self._feed = self._pipe()
        os.set_blocking(self._feed, False)
        return read

    @property
    def ready(self) -> bool:
        """Waiting for an order, and alive at this moment: its end may not have been seen yet."""
        if not self._waiting or "process" not in self._open:
            return False
        poll = select.poll()
        for descriptor in (self._process_fd, self.init_fd):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        return not poll.poll(0)

    def _limit_group(self) -> None:
        if self.order.plan.cgroup is None:
            return
        limits = {
            "memory_bytes": (self.order.memory_mb << 20) + _OWN_MEMORY,
            "processes": self.order.processes + _OWN_PROCESSES,
        }
        with raised():
            if self._group is not None:
                self._group.limit(**limits)
                return
            name = group_name(self._number)
            self._group = Group.create(self.order.plan.cgroup, name, **limits)

    def _launch(self, stdin: int, files: list[int], staged: dict[str, str]) -> None:
        plan = self.order.plan
        out_read, out_write = self._pipe()
        err_read, err_write = self._pipe()
        standard = (stdin, out_write, err_write)
        if plan.bwrap is not None:
            closing = self._spawn_bubblewrap(standard, files, staged)
        else:
            closing = self._spawn_direct(standard, files)
        if self.order.channel:
            closing.append(stdin)
        for descriptor in (out_write, err_write, *closing):
            self._close(descriptor)
        self._watch(out_read, lambda: self._on_output("stdout", out_read))
        self._watch(err_read, lambda: self._on_output("stderr", err_read))
        self._open |= {"stdout", "stderr", "process"}
        self._process_fd = process_fd = self._own(os.pidfd_open(self.pid))
        self._watch(process_fd, lambda: self._on_exit(process_fd))

    def _spawn_bubblewrap(
        self, standard: Standard, files: list[int], staged: dict[str, str]
    ) -> list[int]:
        order, plan = self.order, self.order.plan
        status_read, status_write = self._pipe()
        gate_read, self._gate = self._pipe()
        keep = [*files, status_write, gate_read]
        filter_fd = self._memory(seccomp.build_filter()) if plan.seccomp else None
        words = bubblewrap.options(
            order,
            staged=staged,
            files=files,
            filter_fd=filter_fd,
            status_fd=status_write,
            gate_fd=gate_read,
        )
        options_fd = self._memory("\0".join(words).encode() + b"\0")
        keep += [options_fd, *([] if filter_fd is None else [filter_fd])]
        command = bubblewrap.command(plan, options_fd, order)
        # No environment at all: /proc/1/environ inside the box is bubblewrap's own.
        with self._group.entered() if self._group is not None else contextlib.nullcontext():
            self.pid = execute(command, standard=standard, keep=keep)
        self._open.add("status")
        self._watch(status_read, lambda: self._on_status(status_read))
        return keep

    def _spawn_direct(self, standard: Standard, files: list[int]) -> list[int]:
        order, plan = self.order, self.order.plan
        home = self._home = direct.make_home(order, files)
        self._report, report = self._pipe()
        self.pid = fork(
            direct.command(plan, home, order),
            box_environment(home),
            order=order,
            group=self._group,
            standard=standard,
            last=lambda: direct.close_in(plan, home),
            report=report,
        )
        self._lend()
        self._begin()
        return [report]

    def _begin(self) -> None:
        self._started = time.monotonic()
        self.deadline = self._started + self.order.timeout_s

    # ---- events ----

    def _on_status(self, descriptor: int) -> None:
        """bubblewrap says who the box's first process is; it waits until its limit is set."""
        data = os.read(descriptor, _CHUNK)
        if not data:
            self._forget(descriptor)
            self._open.discard("status")
            return
        self._status_text += data
        *lines, self._status_text = self._status_text.split(b"\n")
        for line in lines:
            facts = json.loads(line)
            self._completed |= "exit-code" in facts
            pid = facts.get("child-pid")
            if pid is None or self._gate is None:
                continue
            try:
                self.init_fd = self._own(os.pidfd_open(pid))
            except OSError as error:
                self._fail(error)
                return
            self._init_pid = pid
            if not self._waiting:
                self._open_gate()

    def _open_gate(self) -> None:
        assert self._gate is not None
        try:
            limit(self._init_pid, self.order)
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
        descriptors = [fd for fd in (self.init_fd, self._channel) if fd is not None]
        if self.lend is not None and descriptors:
            self.lend(descriptors)
        if self._channel is not None:
            self._close(self._channel)
            self._channel = None

    def _feed_program(self) -> None:
        """The program goes in when its limits stand: a box whose warden dies earlier runs nothing."""
        feed = self._feed
        assert feed is not None
        try:
            while self._program:
                self._program = self._program[os.write(feed, self._program) :]
        except BlockingIOError:
            with contextlib.suppress(KeyError):
                self._selector.register(
                    feed, selectors.EVENT_WRITE, lambda: self.guard(self._feed_program)
                )
            return
        except BrokenPipeError:
            pass  # the box has died, which its end reports
        self._forget(feed)

    def _fail(self, error: Exception) -> None:
        self.error = f"{type(error).__name__}: {error}"
        self.kill()

    def _on_output(self, name: str, descriptor: int) -> None:
        data = os.read(descriptor, _CHUNK)
        if not data:
            self._forget(descriptor)
            self._open.discard(name)
            return
        room = self.order.output_bytes - sum(map(len, self.output.values()))
        self.output[name] += data[:room]
        if len(data) > room:
            self.kill(Status.OUTPUT)

    def _on_exit(self, descriptor: int) -> None:
        _, status = os.waitpid(self.pid, 0)
        self._ended = time.monotonic()
        self._exit = os.waitstatus_to_exitcode(status)
        self._forget(descriptor)
        self._open.discard("process")
        self.pid = 0 if self.order.plan.bwrap is not None else self.pid
        self._kill_all()  # a program that ended may have left others behind
        if self.init_fd is not None:
            init_fd = self.init_fd
            self._open.add("namespace")
            self._watch(init_fd, lambda: self._on_empty(init_fd))

    def _on_empty(self, descriptor: int) -> None:
        self._forget(descriptor)
        self.init_fd = None
        self._open.discard("namespace")

    # ---- limits ----

    def check(self, now: float) -> None:
        """Enforce the deadline and the sum of memory."""
        if self.verdict is not None or self._ended is not None:
            return
        if now >= self.deadline:
            if self._started is None:
                self.error = f"it was not ready after {SETUP_S:.0f} s"
            self.kill(Status.TIMEOUT)
        elif now >= self._next_look:
            self._next_look = now + LOOK_S
            if self._over_memory():
                self.kill(Status.MEMORY)

    def _over_memory(self) -> bool:
        """One process the kernel killed for memory ends the run: the rest would wait for it."""
        if self._group is not None and "memory" in self._group.directories:
            return self._group.out_of_memory()
        if not self._init_pid:
            return False
        return resident_bytes(self._init_pid) > self.order.memory_mb << 20

    @property
    def wake_at(self) -> float:
        """When check() is due at the latest; the end of time for a box that is already ending."""
        if self.verdict is not None or self._ended is not None:
            return math.inf
        return min(self.deadline, self._next_look)

    def kill(self, verdict: Status | None = None) -> None:
        if self.verdict is None:
            self.verdict = verdict
        self._kill_all()
        if self.pid and "process" in self._open:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _kill_all(self) -> None:
        if self.init_fd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.init_fd, signal.SIGKILL)
        if self.order.plan.bwrap is None and self.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        if self._group is not None:
            with raised():
                self._group.kill()

    # ---- end ----

    @property
    def done(self) -> bool:
        return not self._open

    def reply(self) -> bytes:
        """Verdict and output as they go back to the caller."""
        stdout, stderr = self.output["stdout"], self.output["stderr"]
        if self.error is None and self.verdict is None:
            self.error = self._setup_error()
        started = self._started or 0.0
        ended = Ending(
            exit=self._exit,
            limit=self.verdict,
            out_of_memory=self._group is not None and self._group.out_of_memory(),
            stderr=bytes(stderr),
        )
        header: Reply = {
            "error": self.error,
            "again": self._started is None and self._exit is not None and self._exit < 0,
            "status": ended.status.value,
            "exit_code": ended.exit_code,
            "wall_s": (self._ended or started) - started,
            "stdout": len(stdout),
        }
        return json.dumps(header).encode() + b"\n" + bytes(stdout) + bytes(stderr)

    def _setup_error(self) -> str | None:
        """Why the program never started; None when it did."""
        if self._report is not None:  # without bubblewrap: what the child said before exec
            return os.read(self._report, _CHUNK).decode(errors="replace").strip() or None
        if self._started is not None and (self._completed or (self._exit or 0) <= 0):
            return None
        return bytes(self.output["stderr"]).decode(errors="replace") or f"exit {self._exit}"

    def release(self) -> bool:
        """Give everything back; False while the cgroup has a member on its way out."""
        self._forget_all()
        if self._home is not None:
            direct.remove_home(self._home)
            self._home = None
        with raised():
            return self._group is None or self._group.remove()
