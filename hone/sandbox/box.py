"""One run of a program, as callbacks in the event loop of the warden; no callback blocks."""

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

from hone.sandbox import bubblewrap, landlock, seccomp
from hone.sandbox.cgroups import Cgroup, cgroup_name, private_memory_bytes
from hone.sandbox.descriptors import DescriptorOwner, create_memfd, fill_and_seal, read_all
from hone.sandbox.plan import RunRequest
from hone.sandbox.processes import StandardFds, as_root, set_rlimits, spawn
from hone.sandbox.result import NotStarted, SandboxError, SandboxResult, Status

SETUP_S = 30.0  # limit on the time from the fork to the start of the program
CHECK_INTERVAL_S = 0.05  # interval between two memory checks
_CHUNK_BYTES = 1 << 16
_BUBBLEWRAP_PROCESSES = 2  # one outside the box, and the first process inside it
_BUBBLEWRAP_MEMORY_BYTES = 8 << 20


class Box(DescriptorOwner):
    """The processes, limits and output of one run, or of a spare."""

    def __init__(self, request: RunRequest, box_id: int, selector: selectors.BaseSelector) -> None:
        super().__init__(selector)
        self.request = request
        self.pid = 0
        self.send_to_caller: Callable[[list[int]], None] | None = None  # sends descriptors
        self._box_id = box_id
        self._deadline = time.monotonic() + SETUP_S
        self._next_check = time.monotonic() + CHECK_INTERVAL_S
        self._is_spare = False
        self._kill_status: Status | None = None  # why the warden killed the run
        self._error: str | None = None
        self._output: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._pending_events: set[str] = set()  # the run is done when this is empty
        self._cgroup: Cgroup | None = None
        self._home: str | None = None
        self._partial_status_line = b""  # the last line of JSON from bubblewrap, if incomplete
        self._pidfd: int | None = None  # of bubblewrap, or without bubblewrap of the program
        self._init_pidfd: int | None = None  # of the first process of the box's PID namespace
        self._init_pid = 0
        self._channel: int | None = None  # the caller's end of stdin, before the caller gets it
        self._block_pipe: int | None = None  # bubblewrap starts the program after it reads a byte
        self._error_pipe: int | None = None  # setup errors of a child without bubblewrap
        self._spare_stdin: int | None = None  # an empty file until the spare gets its request
        self._unwritten_program = memoryview(b"")
        self._program_pipe: int | None = None  # for the source of the program
        self._has_exit_code = False  # whether bubblewrap reported the program's exit code
        self._start_time: float | None = None
        self._end_time: float | None = None
        self._exit_code: int | None = None

    # ---- start ----

    def start(self, stdin_fd: int, file_fds: list[int], mount_points: dict[str, str]) -> None:
        """Starts the processes; `mount_points` are those of `BindMounts.bind`."""
        self._set_cgroup_limits()
        stdin_fd = self._open_channel() if self.request.has_channel else stdin_fd
        if self.request.plan.bwrap_path is None:
            self._launch(stdin_fd, file_fds, mount_points)
        else:
            self._unwritten_program = memoryview(read_all(file_fds[0]))
            program_and_files = [self._open_program_pipe(), *file_fds[1:]]
            self._launch(stdin_fd, program_and_files, mount_points)

    def prepare(self, mount_points: dict[str, str]) -> None:
        """Starts the box as a spare for a later request of the same kind as `self.request`."""
        self._set_cgroup_limits()
        self._is_spare, self._deadline = True, math.inf
        if self.request.has_channel:
            stdin_fd = self._open_channel()
        else:
            stdin_fd = self._spare_stdin = self._track(create_memfd())
        self._launch(stdin_fd, [self._open_program_pipe()], mount_points)

    def assign(self, request: RunRequest, stdin_fd: int, program_fd: int) -> None:
        """Starts the request in a spare: sets the limits, writes standard input, and starts the program."""
        self._is_spare = False
        self.request, self._deadline = request, time.monotonic() + SETUP_S
        self._set_cgroup_limits()
        if self._spare_stdin is not None:
            fill_and_seal(self._spare_stdin, stdin_fd)
            self._close(self._spare_stdin)
        self._unwritten_program = memoryview(read_all(program_fd))
        if self._init_pid:
            self._start_program()

    def _open_channel(self) -> int:
        """Creates a socket pair and returns the end of the box, which `_launch` closes."""
        caller_socket, box_socket = socket.socketpair()
        self._channel = self._track(caller_socket.detach())
        return self._track(box_socket.detach())

    def _open_program_pipe(self) -> int:
        read_fd, self._program_pipe = self._pipe()
        os.set_blocking(self._program_pipe, False)
        return read_fd

    @property
    def is_live_spare(self) -> bool:
        """Whether the box is a spare whose processes are alive."""
        if not self._is_spare or "process" not in self._pending_events:
            return False
        poll = select.poll()
        for descriptor in (self._pidfd, self._init_pidfd):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        return not poll.poll(0)

    def _set_cgroup_limits(self) -> None:
        """Sets the limits of the job on the cgroup; the first call creates the cgroup."""
        parents, job = self.request.plan.parent_cgroups, self.request.job
        if parents is None:
            return
        memory_bytes = (job.memory_mb << 20) + _BUBBLEWRAP_MEMORY_BYTES
        max_processes = job.processes + _BUBBLEWRAP_PROCESSES
        with as_root():
            if self._cgroup is None:
                name = cgroup_name(self._box_id)
                self._cgroup = Cgroup.create(parents, name, memory_bytes, max_processes)
            else:
                self._cgroup.set_limits(memory_bytes, max_processes)

    def _launch(self, stdin_fd: int, file_fds: list[int], mount_points: dict[str, str]) -> None:
        """Starts bubblewrap or, without it, the program; watches the output and the exit."""
        out_read, out_write = self._pipe()
        err_read, err_write = self._pipe()
        standard_fds = (stdin_fd, out_write, err_write)
        if self.request.plan.bwrap_path is not None:
            unneeded_fds = self._spawn_bubblewrap(standard_fds, file_fds, mount_points)
        else:
            self._home = landlock.make_home(self.request, file_fds)
            self._error_pipe, error_write = self._pipe()
            self.pid = landlock.fork_program(
                self.request, self._home, self._cgroup, standard_fds, error_write
            )
            self._send_descriptors()
            self._start_clock()
            unneeded_fds = [error_write]
        if self.request.has_channel:
            unneeded_fds.append(stdin_fd)
        for descriptor in (out_write, err_write, *unneeded_fds):
            self._close(descriptor)
        self._watch("stdout", out_read, lambda: self._on_output("stdout", out_read))
        self._watch("stderr", err_read, lambda: self._on_output("stderr", err_read))
        self._pidfd = self._track(os.pidfd_open(self.pid))
        self._watch("process", self._pidfd, self._on_exit)

    def _spawn_bubblewrap(
        self, standard_fds: StandardFds, file_fds: list[int], mount_points: dict[str, str]
    ) -> list[int]:
        """Starts bubblewrap; returns descriptors that only bubblewrap needs, which the caller closes."""
        status_read, status_write = self._pipe()
        block_read, self._block_pipe = self._pipe()
        pass_fds = [*file_fds, status_write, block_read]
        options = bubblewrap.build_options(self.request, mount_points, file_fds)
        options += ["--json-status-fd", str(status_write), "--block-fd", str(block_read)]
        if self.request.plan.use_seccomp:
            pass_fds.append(self._memfd(seccomp.build_filter()))
            options += ["--seccomp", str(pass_fds[-1])]
        # Bubblewrap reads the options from a descriptor, so that the process list shows no path.
        pass_fds.append(self._memfd("\0".join(options).encode() + b"\0"))
        command = bubblewrap.build_command(self.request, pass_fds[-1])
        # The environment is empty: the box can read the environment of bubblewrap in /proc/1/environ.
        with self._cgroup.thread_inside() if self._cgroup is not None else contextlib.nullcontext():
            self.pid = spawn(command, standard_fds=standard_fds, pass_fds=pass_fds)
        self._watch("status", status_read, lambda: self._on_status(status_read))
        return pass_fds

    def _start_clock(self) -> None:
        self._start_time = time.monotonic()
        self._deadline = self._start_time + self.request.job.timeout_s

    # ---- events ----

    def _watch(self, event: str, descriptor: int, callback: Callable[[], None]) -> None:
        self._pending_events.add(event)
        self._selector.register(descriptor, selectors.EVENT_READ, lambda: self.guard(callback))

    def _end_event(self, event: str, descriptor: int) -> None:
        self._unwatch_and_close(descriptor)
        self._pending_events.discard(event)

    def _on_status(self, descriptor: int) -> None:
        """Reads from bubblewrap the pid of the first process in the box, which waits for its limits."""
        data = os.read(descriptor, _CHUNK_BYTES)
        if not data:
            self._end_event("status", descriptor)
            return
        *lines, self._partial_status_line = (self._partial_status_line + data).split(b"\n")
        for line in lines:
            status = json.loads(line)
            self._has_exit_code |= "exit-code" in status
            pid = status.get("child-pid")
            if pid is not None and self._block_pipe is not None:
                self._init_pidfd = self._track(os.pidfd_open(pid))
                self._init_pid = pid
                if not self._is_spare:
                    self._start_program()

    def _start_program(self) -> None:
        assert self._block_pipe is not None
        try:
            set_rlimits(self._init_pid, self.request.job)
            if self._cgroup is not None:
                with as_root():
                    self._cgroup.add_process(self._init_pid)
            self._send_descriptors()
        except (OSError, ValueError, OverflowError) as error:
            self._fail(error)
            return
        self._start_clock()
        os.write(self._block_pipe, b"x")
        self._close(self._block_pipe)
        self._block_pipe = None
        self._write_program()

    def _send_descriptors(self) -> None:
        """Sends the caller the pidfd of the first process in the box and the channel, if they exist."""
        descriptors = [fd for fd in (self._init_pidfd, self._channel) if fd is not None]
        if self.send_to_caller is not None and descriptors:
            self.send_to_caller(descriptors)
        if self._channel is not None:
            self._close(self._channel)
            self._channel = None

    def _write_program(self) -> None:
        """Writes the source of the program into the box, which has nothing to run before this."""
        pipe = self._program_pipe
        assert pipe is not None
        try:
            while self._unwritten_program:
                written = os.write(pipe, self._unwritten_program)
                self._unwritten_program = self._unwritten_program[written:]
        except BlockingIOError:
            with contextlib.suppress(KeyError):
                retry = functools.partial(self.guard, self._write_program)
                self._selector.register(pipe, selectors.EVENT_WRITE, retry)
            return
        except BrokenPipeError:
            pass  # the box has died; `_on_exit` handles this
        self._unwatch_and_close(pipe)

    def guard(self, action: Callable[[], None]) -> None:
        """Calls the action; an exception ends this run, but not the warden or other runs."""
        try:
            action()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._error = f"{type(error).__name__}: {error}"
        self.kill()

    def _on_output(self, name: str, descriptor: int) -> None:
        data = os.read(descriptor, _CHUNK_BYTES)
        if not data:
            self._end_event(name, descriptor)
            return
        remaining_bytes = self.request.job.output_bytes - sum(map(len, self._output.values()))
        self._output[name] += data[:remaining_bytes]
        if len(data) > remaining_bytes:
            self.kill(Status.OUTPUT)

    def _on_exit(self) -> None:
        assert self._pidfd is not None
        self.kill()  # children of the program may still run
        _, status = os.waitpid(self.pid, 0)
        self._end_time = time.monotonic()
        self._exit_code = os.waitstatus_to_exitcode(status)
        self._end_event("process", self._pidfd)
        self.pid = 0 if self.request.plan.bwrap_path is not None else self.pid
        pidfd = self._init_pidfd
        if pidfd is not None:
            self._watch("namespace", pidfd, lambda: self._on_namespace_end(pidfd))

    def _on_namespace_end(self, pidfd: int) -> None:
        self._end_event("namespace", pidfd)
        self._init_pidfd = None

    # ---- limits ----

    def check(self, now: float) -> None:
        """Enforces the deadline and the limit on total memory."""
        if now < self.wake_at:
            return
        if now >= self._deadline:
            if self._start_time is None:
                self._error = f"it was not ready after {SETUP_S:.0f} s"
            self.kill(Status.TIMEOUT)
            return
        self._next_check = now + CHECK_INTERVAL_S
        # If the kernel killed a process for memory, other processes may wait for this process forever.
        if self._cgroup is not None and "memory" in self._cgroup.directories:
            is_over_limit = self._cgroup.out_of_memory()
        else:
            memory_bytes = private_memory_bytes(self._init_pid) if self._init_pid else 0
            is_over_limit = memory_bytes > self.request.job.memory_mb << 20
        if is_over_limit:
            self.kill(Status.MEMORY)

    @property
    def wake_at(self) -> float:
        """The time of the next `check`; infinity for a box that ends."""
        if self._kill_status is not None or self._end_time is not None:
            return math.inf
        return min(self._deadline, self._next_check)

    def kill(self, status: Status | None = None) -> None:
        """Kills all processes of the box; the first `status` of several calls is the status of the result."""
        self._kill_status = self._kill_status or status
        if self._init_pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init_pidfd, signal.SIGKILL)
        if self.pid:
            # The first process in the box may still wait for bubblewrap, and its pid is not known yet.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        if self.pid and "process" in self._pending_events:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        if self._cgroup is not None:
            with as_root():
                self._cgroup.kill()

    # ---- end ----

    @property
    def is_done(self) -> bool:
        return not self._pending_events

    def reply(self) -> SandboxResult | SandboxError:
        """Returns the result of the run, or the error of the box."""
        stdout, stderr = (bytes(self._output[name]) for name in ("stdout", "stderr"))
        if self._error is None and self._kill_status is None:
            self._error = self._setup_error(stderr)
        if self._error:
            was_killed_early = self._start_time is None and (self._exit_code or 0) < 0
            error_class = NotStarted if was_killed_early else SandboxError
            return error_class(f"sandbox: the box could not be built: {self._error}")
        exit_code = None if self._kill_status is not None else self._exit_code
        if exit_code is not None and exit_code < 0:
            exit_code = 128 - exit_code  # killed by a signal
        start_time = self._start_time or 0.0
        return SandboxResult(
            status=self._status(exit_code, stderr),
            exit_code=exit_code,
            stdout=stdout.decode(errors="replace"),
            stderr=stderr.decode(errors="replace"),
            wall_s=(self._end_time or start_time) - start_time,
        )

    def _status(self, exit_code: int | None, stderr: bytes) -> Status:
        if self._cgroup is not None and self._cgroup.out_of_memory():
            return Status.MEMORY
        if self._kill_status is not None:
            return self._kill_status
        if exit_code == 0:
            return Status.OK
        if exit_code == 128 + signal.SIGXCPU:
            return Status.TIMEOUT
        if exit_code in (None, 128 + signal.SIGKILL, 128 + signal.SIGTERM):
            return Status.KILLED
        return Status.of_failed_program(stderr)

    def _setup_error(self, stderr: bytes) -> str | None:
        """Returns the reason why the program did not start, or None if it started."""
        if self._error_pipe is not None:  # without bubblewrap, the child reports errors before exec
            return os.read(self._error_pipe, _CHUNK_BYTES).decode(errors="replace").strip() or None
        if self._start_time is not None and (self._has_exit_code or (self._exit_code or 0) <= 0):
            return None
        return stderr.decode(errors="replace") or f"exit {self._exit_code}"

    def release(self) -> bool:
        """Releases all resources; returns False while a member of the cgroup still exits."""
        for descriptor in list(self._fds):
            self._unwatch_and_close(descriptor)
        if self._home is not None:
            landlock.remove_home(self._home)
            self._home = None
        with as_root():
            return self._cgroup is None or self._cgroup.remove()
