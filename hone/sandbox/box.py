"""One run from start to verdict, as a few callbacks the warden's loop calls.

Owns the run's descriptors, its cgroup and its deadline; gives all of them back. Never blocks.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import time
from collections.abc import Callable

from hone.sandbox import bubblewrap, direct, seccomp
from hone.sandbox.cgroups import Group, group_name
from hone.sandbox.plan import Order, box_environment
from hone.sandbox.result import Status
from hone.sandbox.rights import raised
from hone.sandbox.spawn import SETUP_FAILED, Standard, execute, fork, limit

SETUP_S = 30.0  # longest time from fork to the program's start
LOOK_S = 0.05  # how often a box's memory is looked at
_CHUNK = 1 << 16
_OWN_PROCESSES = 1  # the first process of the box, which is bubblewrap's
_OWN_MEMORY = 8 << 20


class Box:
    """A program that runs, or is about to."""

    def __init__(self, order: Order, number: int, selector: selectors.BaseSelector) -> None:
        self.order = order
        self.pid = 0
        self.init_fd: int | None = None  # the first process of the box's PID namespace
        self.deadline = time.monotonic() + SETUP_S
        self._next_look = time.monotonic() + LOOK_S
        self.verdict: Status | None = None
        self.error: str | None = None
        self.output: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._number = number
        self._selector = selector
        self._group: Group | None = None
        self._home: str | None = None
        self._fds: set[int] = set()
        self._open: set[str] = set()
        self._status_text = b""
        self._gate: int | None = None
        self._completed = False  # bubblewrap saw the program itself end
        self._init_pid = 0
        self._started: float | None = None
        self._ended: float | None = None
        self._exit: int | None = None

    # ---- start ----

    def start(self, stdin: int, files: list[int], staged: dict[str, str]) -> None:
        """Fork. staged: see Stage.bind. OSError leaves nothing behind but what release() takes away."""
        order, plan = self.order, self.order.plan
        if plan.cgroup is not None:
            with raised():
                self._group = Group.create(
                    plan.cgroup,
                    group_name(self._number),
                    memory_bytes=(order.memory_mb << 20) + _OWN_MEMORY,
                    processes=order.processes + _OWN_PROCESSES,
                )
        out_read, out_write = self._pipe()
        err_read, err_write = self._pipe()
        standard = (stdin, out_write, err_write)
        if plan.bwrap is not None:
            closing = self._spawn_bubblewrap(standard, files, staged)
        else:
            closing = self._spawn_direct(standard, files)
        for descriptor in (out_write, err_write, *closing):
            self._close(descriptor)
        self._watch(out_read, lambda: self._on_output("stdout", out_read))
        self._watch(err_read, lambda: self._on_output("stderr", err_read))
        self._open |= {"stdout", "stderr", "process"}
        process_fd = self._own(os.pidfd_open(self.pid))
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
        self.pid = execute(command, standard=standard, keep=keep)
        self._open.add("status")
        self._watch(status_read, lambda: self._on_status(status_read))
        return keep[len(files) :]

    def _spawn_direct(self, standard: Standard, files: list[int]) -> list[int]:
        order, plan = self.order, self.order.plan
        home = self._home = direct.make_home(order, files)

        def close_in() -> None:
            os.setsid()
            direct.close_in(plan, home)

        self.pid = fork(
            direct.command(plan, home, order),
            box_environment(home),
            order=order,
            group=self._group,
            standard=standard,
            last=close_in,
        )
        self._begin()
        return []

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
                limit(pid, self.order)
                if self._group is not None:
                    with raised():
                        self._group.admit(pid)
            except OSError as error:
                self.error = f"its first process could not be limited: {error}"
                self.kill()
                return
            self._init_pid = pid
            self._begin()
            os.write(self._gate, b"x")
            self._close(self._gate)
            self._gate = None

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
        return _resident_bytes(self._init_pid) > self.order.memory_mb << 20

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
        if self.order.plan.bwrap is None:
            set_up = self._exit != SETUP_FAILED
        else:
            set_up = self._completed or self._exit is None or self._exit < 0
        if self.error is None and self.verdict is None and not set_up:
            self.error = stderr.decode(errors="replace").strip() or f"exit {self._exit}"
        started = self._started or 0.0
        header = {
            "error": self.error,
            "status": self._status().value,
            "exit_code": self._exit_code(),
            "wall_s": (self._ended or started) - started,
            "stdout": len(stdout),
        }
        return json.dumps(header).encode() + b"\n" + bytes(stdout) + bytes(stderr)

    def _exit_code(self) -> int | None:
        if self.verdict is not None or self._exit is None:
            return None
        return self._exit if self._exit >= 0 else 128 - self._exit

    def _status(self) -> Status:
        code = self._exit_code()
        if self._group is not None and self._group.out_of_memory():
            return Status.MEMORY
        if self.verdict is not None:
            return self.verdict
        if code == 0:
            return Status.OK
        if code == 128 + signal.SIGXCPU:
            return Status.TIMEOUT
        if code in (None, 128 + signal.SIGKILL, 128 + signal.SIGTERM):
            return Status.KILLED
        last_line = bytes(self.output["stderr"]).rstrip().rpartition(b"\n")[2]
        return Status.MEMORY if last_line.startswith(b"MemoryError") else Status.ERROR

    def release(self) -> bool:
        """Give everything back; False while the cgroup has a member on its way out."""
        for descriptor in list(self._fds):
            self._forget(descriptor)
        if self._home is not None:
            direct.remove_home(self._home)
            self._home = None
        with raised():
            return self._group is None or self._group.remove()

    # ---- descriptors ----

    def _pipe(self) -> tuple[int, int]:
        read, write = os.pipe2(os.O_CLOEXEC)
        return self._own(read), self._own(write)

    def _memory(self, data: bytes) -> int:
        descriptor = self._own(os.memfd_create("hone", os.MFD_CLOEXEC))
        os.write(descriptor, data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor

    def _own(self, descriptor: int) -> int:
        self._fds.add(descriptor)
        return descriptor

    def _watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, callback)

    def _forget(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)
        self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        if descriptor in self._fds:
            self._fds.remove(descriptor)
            os.close(descriptor)


def _resident_bytes(root: int) -> int:
    """Private memory of a process and all it started."""
    pages, queue = 0, [root]
    while queue:
        pid = queue.pop()
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{pid}/statm") as statm:
                _, resident, shared, *_ = map(int, statm.read().split())
            pages += resident - shared
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as children:
                    queue.extend(map(int, children.read().split()))
    return pages * os.sysconf("SC_PAGE_SIZE")
