"""Starts the nodes of a Ray cluster, runs one job on the head node and stops the nodes.

A transport is the command that runs a shell line on a host: bash on this machine, ssh or srun.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeAlias

from hone.launch import STOPPED_EXIT_STATUS, LaunchError
from hone.launch.node import NodeSettings, NodeStatus

logger = logging.getLogger(__name__)

END_DEADLINE_S = 30.0
STDERR_LINES = 6
"""An error message about a node ends with this many of its last lines."""
_NamedProcesses: TypeAlias = list[tuple[str, subprocess.Popen[str]]]
"""Each process with its name in messages."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TRANSPORTS: dict[str, Callable[[str, str], list[str]]] = {
    "local": lambda _host, shell_line: ["bash", "-c", shell_line],
    # ssh does not ask for a password, and a dead connection ends after about 60 s.
    "ssh": lambda host, shell_line: [
        *("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ConnectTimeout=20"),
        *("--", host, shlex.join(["bash", "-c", shell_line])),
    ],
    "srun": lambda host, shell_line: [
        # By default a step of one task gets one core and its share of the memory.
        *("srun", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mem=0"),
        *(f"--nodelist={host}", "bash", "-c", shell_line),
    ],
}
"""The command of each transport, from a host and a shell line."""


@dataclass(frozen=True)
class LaunchPlan:
    """The hosts of a cluster and the command that runs on it."""

    transport: str
    hosts: tuple[str, ...]
    """The first host is the head node."""
    command: tuple[str, ...]
    folder: str
    """The working folder on every node."""
    python: str = sys.executable
    setup: str = ""
    """A shell line that every host runs first, for example `source env.sh`."""
    gpus: int | None = None
    """GPUs per node; by default Ray detects them."""
    port: int = 0
    """The port of Ray's control plane; 0 selects a free one."""
    start_deadline_s: float = 300.0


def run(plan: LaunchPlan, report: Callable[[str], None], write: Callable[[str], None]) -> int:
    """Starts the nodes, runs the job and stops the nodes; returns the job's exit status.

    `report` receives status messages, and `write` receives the output of the job.
    """
    with _stop_on_signals() as stop_event, contextlib.ExitStack() as exit_stack:
        node_processes: _NamedProcesses = []
        exit_stack.callback(_stop_processes, node_processes)
        is_local = plan.transport == "local"
        settings = NodeSettings(
            mark=secrets.token_hex(8),
            token=secrets.token_hex(32),
            port=plan.port,
            gpus=(plan.gpus or 0) if is_local else plan.gpus,
            only_loopback=is_local,
        )
        report(f"starting Ray on {len(plan.hosts)} nodes, the head on {plan.hosts[0]}")
        head = _Node(plan, plan.hosts[0], settings, node_processes).wait_until_ready(stop_event)
        settings = replace(settings, head=head.address, port=0)
        starting_nodes: dict[str, _Node] = {}
        for host in plan.hosts[1:]:
            if host in starting_nodes:  # raylets that start at the same time on one host may fail
                starting_nodes.pop(host).wait_until_ready(stop_event)
            starting_nodes[host] = _Node(plan, host, settings, node_processes)
        for node in starting_nodes.values():
            node.wait_until_ready(stop_event)
        report(
            f"{len(plan.hosts)} nodes are up at {head.address}; the job server of the head is {head.jobs}"
        )
        request = {
            "jobs": head.jobs,
            "token_file": head.token_file,
            "entrypoint": entrypoint(plan.command, plan.folder, plan.python),
        }
        return _run_job(plan, request, stop_event, report, write)


def entrypoint(command: Sequence[str], folder: str, python: str) -> str:
    """Returns the shell line that runs a command; `hone` and `python` run with the interpreter `python`."""
    arguments = list(command)
    if arguments[0] == "hone":
        arguments[:1] = [python, "-m", "hone.cli"]
    elif arguments[0] in ("python", "python3"):
        arguments[0] = python
    return f"cd {shlex.quote(folder)} && exec {shlex.join(arguments)}"


class _Node:
    """The process that runs one node; closing its standard input stops Ray."""

    def __init__(
        self, plan: LaunchPlan, host: str, settings: NodeSettings, node_processes: _NamedProcesses
    ) -> None:
        self.host, self._deadline_s = host, plan.start_deadline_s
        self._stderr_lines: list[str] = []
        self._process = _start_process(plan, host, "hone.launch.node", asdict(settings))
        node_processes.append((f"the node {host}", self._process))
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read_answer, daemon=True).start()
        self._stderr_reader = threading.Thread(target=self._collect_stderr, daemon=True)
        self._stderr_reader.start()

    def _read_answer(self) -> None:
        assert self._process.stdout is not None
        # A --setup line may write before the answer.
        answers = (line for line in self._process.stdout if line.startswith("{"))
        self._answers.put(next(answers, ""))

    def _collect_stderr(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._stderr_lines.append(line)
            del self._stderr_lines[:-STDERR_LINES]

    def wait_until_ready(self, stop_event: threading.Event) -> NodeStatus:
        """Waits until the node has joined the cluster; raises LaunchError if it does not."""
        waited_s = 0.0
        while waited_s < self._deadline_s:
            if stop_event.is_set():
                raise KeyboardInterrupt
            try:
                line = self._answers.get(timeout=0.2)
            except queue.Empty:
                waited_s += 0.2
                continue
            status = NodeStatus(error="no answer")
            if line:
                status = NodeStatus(**json.loads(line))
            if not status.error:
                return status
            with contextlib.suppress(subprocess.TimeoutExpired):  # so that stderr is complete
                self._process.wait(END_DEADLINE_S)
            self._stderr_reader.join(END_DEADLINE_S)
            detail = "".join(self._stderr_lines).strip()
            raise LaunchError(
                f"the node {self.host} did not start: {status.error}\n{detail}".rstrip()
            )
        raise LaunchError(
            f"the node {self.host} did not start within {self._deadline_s:g} s; check that it is "
            "reachable, or raise --start-timeout"
        )


def _start_process(
    plan: LaunchPlan, host: str, module: str, request: Mapping[str, object]
) -> subprocess.Popen[str]:
    """Starts a module on a host and writes the request, as one line of JSON, to its standard input."""
    shell_line = f"cd {shlex.quote(plan.folder)} && exec {shlex.quote(plan.python)} -m {module}"
    if (
        plan.setup
    ):  # `eval` separates a comment or a `;` at the end of the setup line from the command
        shell_line = f"eval {shlex.quote(plan.setup)} && {shell_line}"
    process = subprocess.Popen(
        TRANSPORTS[plan.transport](host, shell_line),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches only this process; `run` stops the job
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # `wait_until_ready` reports the failure
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
    return process


def _run_job(
    plan: LaunchPlan,
    request: Mapping[str, object],
    stop_event: threading.Event,
    report: Callable[[str], None],
    write: Callable[[str], None],
) -> int:
    """Runs the job on the head node until the job ends; stops the job when `stop_event` is set."""
    job = _start_process(plan, plan.hosts[0], "hone.launch.job", request)
    assert job.stdout is not None
    assert job.stderr is not None
    assert job.stdin is not None
    readers = [
        threading.Thread(target=_copy_lines, args=(stream, write), daemon=True)
        for stream in (job.stdout, job.stderr)
    ]
    for reader in readers:
        reader.start()
    try:
        while job.poll() is None and not stop_event.wait(0.2):
            pass
        if job.poll() is None:
            stop_event.clear()  # before the message, which asks for the second Ctrl-C
            report(
                "stopping the job; it may save first. Press Ctrl-C again to stop the cluster now"
            )
            job.stdin.close()
            while job.poll() is None and not stop_event.wait(0.2):
                pass
            if job.poll() is None:
                job.kill()
    finally:
        _stop_processes([("the job", job)])
    for reader in readers:
        reader.join(END_DEADLINE_S)
    return STOPPED_EXIT_STATUS if job.returncode < 0 else job.returncode


def _copy_lines(stream: Iterator[str], write: Callable[[str], None]) -> None:
    for line in stream:
        write(line)


def _stop_processes(processes: _NamedProcesses) -> None:
    """Closes the standard input of all processes; kills those that have not ended in END_DEADLINE_S."""
    for _, process in processes:
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
    end_time = time.monotonic() + END_DEADLINE_S
    for name, process in processes:
        try:
            process.wait(max(end_time - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            logger.warning("%s has not ended in %g s; it is killed", name, END_DEADLINE_S)
            process.kill()
            process.wait()


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """Yields an event that Ctrl-C, SIGTERM and SIGHUP set; under `nohup`, SIGHUP stays ignored."""
    stop_event = threading.Event()
    previous_handlers = {
        number: signal.signal(number, lambda *_: stop_event.set())
        for number in STOP_SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield stop_event
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
