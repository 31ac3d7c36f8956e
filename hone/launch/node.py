"""Starts Ray on one node of a launched cluster, and stops Ray when standard input closes.

`hone launch` runs this module on every host over ssh or srun (`python -m hone.launch.node`). Standard
input has one line of JSON, so that the token is not on a command line.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from hone.launch import reaper
from hone.launch.free_ports import free_ports
from hone.launch.ray_environment import LOOPBACK_ENV, allow_slow_start

LOOPBACK = "127.0.0.1"
HEAD_FOLDER, CLUSTER_FILE = "head", "cluster.json"
LOG_READERS_FILE = "followers"
"""Each `hone jobs logs` holds a shared lock of this file while it reads."""
STOP_WAIT_S = 120
"""Time that a stopped job has to save and end; Ray's default is 3 s."""
LOG_READERS_WAIT_S = 10.0
"""Time that `hone jobs logs` has to read the end of a log before the cluster stops."""


@dataclass(frozen=True)
class NodeSettings:
    """The settings of one node."""

    mark: str
    """Identifies the launch in the name of its folder, and in the environment of the node's processes."""
    token: str
    head: str = ""
    """The address of the head node; empty for the head itself."""
    port: int = 0
    """The port of Ray's control plane on the head; 0 selects a free one."""
    gpus: int | None = None
    """None lets Ray detect the GPUs."""
    only_loopback: bool = False


@dataclass(frozen=True)
class NodeStatus:
    """The status that a node sends: an error, or the addresses of the control plane and the job server."""

    address: str = ""
    jobs: str = ""
    """The URL of the job server, which only the head has."""
    token_file: str = ""
    error: str = ""


def launch_folder(mark: str = "") -> Path:
    """Returns the folder of the cluster with this mark, or of all clusters if `mark` is empty."""
    return Path.home() / ".hone" / "launch" / mark


def main() -> None:
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # runs the `finally` below
    settings = NodeSettings(**json.loads(sys.stdin.readline()))
    answer_stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # Ray's output goes to stderr

    def send_status(status: NodeStatus) -> None:
        answer_stream.write(json.dumps(asdict(status)) + "\n")
        answer_stream.flush()

    # Several nodes may share one machine or one home.
    folder_name = f"{socket.gethostname()}-{os.getpid()}" if settings.head else HEAD_FOLDER
    folder = launch_folder(settings.mark) / folder_name
    reaper_process = reaper.start_reaper(f"{settings.mark}-{os.getpid()}")
    # Ray's session folder is world-writable, so it is made inside a private folder. In Ray's default folder,
    # other programs would find the cluster and join it.
    session_folder = tempfile.mkdtemp(prefix="hone-ray-")
    try:
        run_node(settings, folder, session_folder, send_status)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        reaper.kill_marked_processes(f"{settings.mark}-{os.getpid()}")
        reaper_process.kill()
        for path in (folder, session_folder):
            shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # another node may still use the folder
            folder.parent.rmdir()


def run_node(
    settings: NodeSettings,
    folder: Path,
    session_folder: str,
    send_status: Callable[[NodeStatus], None],
) -> None:
    """Starts Ray on this node, sends its status and waits for the end of standard input."""
    folder.mkdir(parents=True, mode=0o700)
    token_file = folder / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(settings.token, encoding="utf-8")
    os.environ.pop("RAY_AUTH_TOKEN", None)  # would take precedence over the token file
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S),
        **reaper.marked_environment(f"{settings.mark}-{os.getpid()}"),
    }
    allow_slow_start()
    if settings.only_loopback:
        os.environ[LOOPBACK_ENV] = "0"
    try:
        status = start_ray(settings, token_file, session_folder)
    except Exception as error:  # Ray raises many kinds of exceptions
        send_status(
            NodeStatus(error=f"{type(error).__name__}: {error}{_raylet_failure(session_folder)}")
        )
        return
    if not settings.head:
        cluster_file = folder / CLUSTER_FILE
        cluster_file.touch(mode=0o600)
        process = {"host": socket.gethostname(), "pid": os.getpid()}
        cluster_file.write_text(json.dumps(asdict(status) | process), encoding="utf-8")
    send_status(status)
    while sys.stdin.readline():
        pass
    with contextlib.suppress(OSError):  # the file system has no locks, or a signal ended the wait
        _wait_for_log_readers(folder / LOG_READERS_FILE)


def _wait_for_log_readers(file: Path) -> None:
    """Waits up to LOG_READERS_WAIT_S until no `hone jobs logs` locks the file."""
    end_time = time.monotonic() + LOG_READERS_WAIT_S
    with open(file, "a", encoding="utf-8") as lock:
        while time.monotonic() < end_time:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)


def start_ray(settings: NodeSettings, token_file: Path, session_folder: str) -> NodeStatus:
    """Runs `ray start` in this process; the processes of Ray are its children."""
    from hone.launch import ray_private  # after the environment is set: Ray reads it when imported

    options = ["--disable-usage-stats", "--log-color=false", f"--temp-dir={session_folder}/ray"]
    if settings.gpus is not None:
        options.append(f"--num-gpus={settings.gpus}")
    if settings.head:
        _wait_until_reachable(settings.head)
        ray_private.start_node([f"--address={settings.head}", *options], settings.only_loopback)
        return NodeStatus(settings.head, token_file=str(token_file))
    port, jobs_port = free_ports(2)
    port = settings.port or port
    options += ["--head", "--no-monitor", f"--port={port}", f"--dashboard-host={LOOPBACK}"]
    options += ["--include-dashboard=true", f"--dashboard-port={jobs_port}"]
    host = ray_private.start_node(options, settings.only_loopback)
    return NodeStatus(f"{host}:{port}", f"http://{LOOPBACK}:{jobs_port}", str(token_file))


def _raylet_failure(session_folder: str) -> str:
    """Returns a line about the failed check in the raylet's log, or an empty string."""
    for file in Path(session_folder).glob("ray/session_latest/logs/raylet.out"):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if "Check failed: " in line:
                return f"\nits raylet: {line.partition('Check failed: ')[2]}"
    return ""


def _wait_until_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    end_time = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((host, int(port)), 5).close()
        except OSError as error:
            if time.monotonic() > end_time:
                raise ConnectionError(
                    f"the head {address} cannot be reached from {socket.gethostname()} ({error}); open "
                    "the ports between the nodes"
                ) from error
            time.sleep(0.5)


if __name__ == "__main__":
    main()
