"""Starts the nodes of a cluster through a transport, runs one job on the head and ends everything.

A transport is a command that runs a shell line on a host: none for this machine, ssh, or srun.
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

from hone.config.errors import ConfigError
from hone.launch.node import NodeSettings, Ready

logger = logging.getLogger(__name__)

END_DEADLINE_S = 30.0
_Named: TypeAlias = list[tuple[str, subprocess.Popen[str]]]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TRANSPORTS: dict[str, Callable[[str, str], list[str]]] = {
    "local": lambda host, line: ["bash", "-c", line],
    # No terminal is asked for a password, and a dead connection is noticed after 60 s.
    "ssh": lambda host, line: [
        *("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ConnectTimeout=20"),
        *("--", host, shlex.join(["bash", "-c", line])),
    ],
    "srun": lambda host, line: [
        # All cores and all memory of the node, although the step has one task.
        *("srun", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mem=0"),
        *(f"--nodelist={host}", "bash", "-c", line),
    ],
}


class LaunchError(ConfigError):
    """A node could not be started; the message says which, and what to do."""


@dataclass(frozen=True)
class Plan:
    """What to start, and where."""

    transport: str
    hosts: tuple[str, ...]
    """The first is the head."""
    command: tuple[str, ...]
    folder: str
    """The working folder on every node."""
    python: str = sys.executable
    setup: str = ""
    """A shell line that every host runs first, as in `source env.sh`."""
    gpus: int | None = None
    port: int = 0
    start_deadline_s: float = 300.0


def run(plan: Plan, tell: Callable[[str], None], write: Callable[[str], None]) -> int:
    """Starts the nodes, runs the command as a job and ends the nodes; returns the job's exit status."""
    with _stop_requests() as stops, contextlib.ExitStack() as ends:
        nodes: _Named = []
        ends.callback(_end, nodes)
        loopback = plan.transport == "local"
        settings = NodeSettings(
            mark=secrets.token_hex(8),
            token=secrets.token_hex(32),
            port=plan.port,
            gpus=(plan.gpus or 0) if loopback else plan.gpus,
            only_loopback=loopback,
        )
        tell(f"starting Ray on {len(plan.hosts)} nodes, the head on {plan.hosts[0]}")
        head = _Node(plan, plan.hosts[0], settings, nodes).ready(stops)
        settings = replace(settings, head=head.address, port=0)
        starting: dict[str, _Node] = {}
        for host in plan.hosts[1:]:
            if host in starting:  # two raylets that start at once on one machine hinder each other
                starting.pop(host).ready(stops)
            starting[host] = _Node(plan, host, settings, nodes)
        for node in starting.values():
            node.ready(stops)
        tell(f"{len(plan.hosts)} nodes are up at {head.address}; jobs at {head.jobs} on the head")
        order = {
            "jobs": head.jobs,
            "token_file": head.token_file,
            "entrypoint": entrypoint(plan.command, plan.folder, plan.python),
        }
        return _follow(plan, order, stops, tell, write)


def entrypoint(command: Sequence[str], folder: str, python: str) -> str:
    """Returns the shell line of a command; `hone` and `python` are those of the launch."""
    words = list(command)
    if words[0] == "hone":
        words[:1] = [python, "-m", "hone.cli"]
    elif words[0] in ("python", "python3"):
        words[0] = python
    return f"cd {shlex.quote(folder)} && exec {shlex.join(words)}"


class _Node:
    """The connection to one node; closing its standard input ends the node's Ray."""

    def __init__(self, plan: Plan, host: str, settings: NodeSettings, nodes: _Named) -> None:
        self.host, self._deadline_s = host, plan.start_deadline_s
        self._errors: list[str] = []
        self._process = _started(plan, host, "hone.launch.node", asdict(settings))
        nodes.append((f"the node {host}", self._process))
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._keep_errors, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        # A --setup line may write before the answer.
        answers = (line for line in self._process.stdout if line.startswith("{"))
        self._answers.put(next(answers, ""))

    def _keep_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors.append(line)
            del self._errors[:-20]

    def ready(self, stops: threading.Event) -> Ready:
        """Waits until the node has joined."""
        waited = 0.0
        while waited < self._deadline_s:
            if stops.is_set():
                raise KeyboardInterrupt
            try:
                line = self._answers.get(timeout=0.2)
            except queue.Empty:
                waited += 0.2
                continue
            answer = Ready(**json.loads(line)) if line else Ready(error="no answer")
            if not answer.error:
                return answer
            with contextlib.suppress(subprocess.TimeoutExpired):  # for its last errors only
                self._process.wait(END_DEADLINE_S)
            detail = "".join(self._errors[-6:]).strip()
            raise LaunchError(
                f"the node {self.host} did not start: {answer.error}\n{detail}".rstrip()
            )
        raise LaunchError(
            f"the node {self.host} did not start within {self._deadline_s:g} s; see whether it is "
            "reachable, or raise --start-timeout"
        )


def _started(
    plan: Plan, host: str, module: str, order: Mapping[str, object]
) -> subprocess.Popen[str]:
    line = f"cd {shlex.quote(plan.folder)} && exec {shlex.quote(plan.python)} -m {module}"
    line = f"{plan.setup} && {line}" if plan.setup else line
    process = subprocess.Popen(
        TRANSPORTS[plan.transport](host, line),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches the job through us, once
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # its end is reported when its answer is read
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
    return process


def _follow(
    plan: Plan,
    order: Mapping[str, object],
    stops: threading.Event,
    tell: Callable[[str], None],
    write: Callable[[str], None],
) -> int:
    job = _started(plan, plan.hosts[0], "hone.launch.job", order)
    assert job.stdout is not None
    assert job.stderr is not None
    assert job.stdin is not None
    readers = [
        threading.Thread(target=_copy, args=(stream, write), daemon=True)
        for stream in (job.stdout, job.stderr)
    ]
    for reader in readers:
        reader.start()
    try:
        while job.poll() is None and not stops.wait(0.2):
            pass
        if job.poll() is None:
            tell("stopping the job; it may save first. Again to end the cluster at once")
            stops.clear()
            job.stdin.close()
            while job.poll() is None and not stops.wait(0.2):
                pass
            stops.set()
    finally:
        _end([("the job", job)])
    for reader in readers:
        reader.join(END_DEADLINE_S)
    return job.returncode


def _copy(stream: Iterator[str], write: Callable[[str], None]) -> None:
    for line in stream:
        write(line)


def _end(processes: _Named) -> None:
    """Closes the standard input of all, then waits for them."""
    for _, process in processes:
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
    end_time = time.monotonic() + END_DEADLINE_S
    for name, process in processes:
        try:
            process.wait(max(end_time - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            logger.warning("%s has not ended in %g s; its connection is cut", name, END_DEADLINE_S)
            process.kill()
            process.wait()


@contextlib.contextmanager
def _stop_requests() -> Iterator[threading.Event]:
    """Yields an event that Ctrl-C, SIGTERM and SIGHUP set."""
    stops = threading.Event()
    before = {number: signal.signal(number, lambda *_: stops.set()) for number in SIGNALS}
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
