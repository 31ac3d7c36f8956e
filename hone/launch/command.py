"""The commands `hone launch` and `hone jobs`."""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeAlias

from hone.launch import LaunchError
from hone.launch.cluster import LaunchPlan, run
from hone.launch.node import CLUSTER_FILE, HEAD_FOLDER, LOG_READERS_FILE, launch_folder
from hone.launch.scripts import rayjob_manifest, sbatch_script
from hone.types import Fields

_Launchers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_TRAINING_MODULE = re.compile(r"(hone|verl|recipe)\..*\bmain_(ppo|ppo_format|dapo|entropy|prime)")
"""The modules of RL programs, by hone's or verl's path."""
_NODE_OPTIONS = ("setup", "python", "folder", "start_timeout")
NETWORK_WARNING = (
    "Ray listens on every network interface of the nodes and requires a token. Block access to "
    "the nodes from other networks"
)


def launch(arguments: Sequence[str]) -> int:
    """Runs `hone launch`; returns the exit status of the job, or 0 for a written file."""
    argv = list(arguments)
    separator = argv.index("--") if "--" in argv else len(argv)
    parser = _parser()
    options = parser.parse_args(argv[:separator])
    command = argv[separator + 1 :]
    if not command:
        parser.error("write the command after --: hone launch local -- hone train key=value …")
    if options.nodes is not None and options.nodes < 1:
        parser.error(f"--nodes {options.nodes}: give at least 1")
    if options.gpus_per_node is not None and options.gpus_per_node < 0:
        parser.error(f"--gpus-per-node {options.gpus_per_node}: give 0 or more")
    if options.start_timeout is not None and not options.start_timeout > 0:
        parser.error(f"--start-timeout {options.start_timeout:g}: give more than 0")
    if options.launcher in ("slurm", "kubernetes"):
        return _write_job_file(options, command, parser)
    hosts = _host_names(options)
    if options.launcher != "local":
        _write_line(NETWORK_WARNING)
    plan = LaunchPlan(
        transport=options.launcher,
        hosts=hosts,
        command=tuple(_add_cluster_size(command, len(hosts), options.gpus_per_node)),
        folder=options.folder or os.getcwd(),
        python=options.python or sys.executable,
        setup=options.setup or "",
        gpus=options.gpus_per_node,
        port=getattr(options, "port", 0),
        start_deadline_s=options.start_timeout or LaunchPlan.start_deadline_s,
    )
    return run(plan, _write_line, _write_and_flush)


def _write_and_flush(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        # The reader has ended, as `head` does after ten lines. The job continues.
        with open(os.devnull, "w") as null_device:
            os.dup2(null_device.fileno(), sys.stdout.fileno())


def _write_line(text: str) -> None:
    """Writes one line; control characters, as in the command of a job, are escaped."""
    escaped = (c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    _write_and_flush("".join(escaped) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hone launch",
        description="Start Ray on several nodes, run a command on them and stop Ray.",
        usage="hone launch [--nodes N] [--gpus-per-node G] {slurm,kubernetes,ssh,local} … -- COMMAND",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help="number of nodes (default: all hosts of the list; local: 3)",
    )
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        metavar="G",
        help="GPUs per node (slurm and kubernetes: 8 by default)",
    )
    parser.add_argument("--setup", metavar="LINE", help="shell line that each node runs first")
    parser.add_argument("--python", help="interpreter on the nodes (default: this one)")
    parser.add_argument("--folder", help="working folder on the nodes (default: this one)")
    parser.add_argument(
        "--start-timeout",
        type=float,
        metavar="S",
        help="seconds that a node may take to start (default: 300)",
    )
    launchers = parser.add_subparsers(dest="launcher", required=True)
    _add_job_file_launchers(launchers)
    _add_running_launchers(launchers)
    return parser


def _add_job_file_launchers(launchers: _Launchers) -> None:
    """Adds the launchers that write a file for a job scheduler."""
    slurm = launchers.add_parser("slurm", help="write an sbatch script", allow_abbrev=False)
    slurm.add_argument("--submit", action="store_true", help="submit it with sbatch")
    slurm.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="another option of sbatch, as in --sbatch=--partition=gpu",
    )
    kubernetes = launchers.add_parser(
        "kubernetes", help="write the manifest of a KubeRay RayJob", allow_abbrev=False
    )
    kubernetes.add_argument("--image", required=True, help="container image with hone and Ray")
    kubernetes.add_argument("--namespace")
    kubernetes.add_argument("--volume", action="append", default=[], metavar="CLAIM:/PATH")
    kubernetes.add_argument("--env-secret", action="append", default=[], metavar="SECRET")
    kubernetes.add_argument("--cpus", type=int, default=32, help="CPUs per node (default: 32)")
    kubernetes.add_argument("--memory", default="256Gi", help="memory per node (default: 256Gi)")
    for launcher, suffix in ((slurm, "sbatch"), (kubernetes, "yaml")):
        launcher.add_argument("--name", default="hone", help="name of the job (default: hone)")
        launcher.add_argument(
            "--out", metavar="FILE", help=f"file to write (default: NAME.{suffix})"
        )


def _add_running_launchers(launchers: _Launchers) -> None:
    """Adds the launchers that start the nodes and run the command at once."""
    for name, help_text in (
        ("ssh", "start the nodes over ssh on the hosts of a file"),
        ("srun", argparse.SUPPRESS),
    ):
        launcher = launchers.add_parser(name, help=help_text, allow_abbrev=False)
        launcher.add_argument(
            "--hosts",
            required=True,
            metavar="FILE",
            help="file with one host per line, the head node first",
        )
        launcher.add_argument(
            "--port", type=int, default=0, help="port of Ray's control plane (default: a free one)"
        )
    launchers.add_parser(
        "local", help="start several raylets on this machine, for a trial", allow_abbrev=False
    )


def _host_names(options: argparse.Namespace) -> tuple[str, ...]:
    if options.launcher == "local":
        return ("this machine",) * (options.nodes or 3)
    lines = Path(options.hosts).read_text(encoding="utf-8").splitlines()
    hosts = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if invalid_hosts := [host for host in hosts if host.startswith("-") or len(host.split()) > 1]:
        raise LaunchError(
            f"{options.hosts}: {invalid_hosts[0]!r} is not a host name; write one per line"
        )
    nodes = options.nodes or len(hosts)
    if not hosts or nodes > len(hosts):
        raise LaunchError(f"{options.hosts} names {len(hosts)} hosts and --nodes asks for {nodes}")
    return tuple(hosts[:nodes])


def _add_cluster_size(command: Sequence[str], nodes: int, gpus: int | None) -> list[str]:
    """Appends the size of the cluster to a training command that does not set it."""
    arguments = list(command)
    if not any(_is_training_program(*pair) for pair in itertools.pairwise(arguments)):
        return arguments
    sizes = {"trainer.nnodes": nodes, "trainer.n_gpus_per_node": gpus or None}
    keys = {argument.lstrip("+").partition("=")[0] for argument in arguments}
    return arguments + [
        f"{key}={size}" for key, size in sizes.items() if size is not None and key not in keys
    ]


def _is_training_program(first: str, second: str) -> bool:
    """Whether two successive arguments are `hone train`, or `-m` and the module of an RL program."""
    if first == "-m":
        return _TRAINING_MODULE.fullmatch(second) is not None
    return os.path.basename(first) in ("hone", "hone.cli") and second == "train"


def _write_job_file(
    options: argparse.Namespace, command: Sequence[str], parser: argparse.ArgumentParser
) -> int:
    if (nodes := options.nodes) is None:
        parser.error(f"{options.launcher}: give --nodes")
    gpus = 8 if options.gpus_per_node is None else options.gpus_per_node
    is_slurm = options.launcher == "slurm"
    if is_slurm:
        text = sbatch_script(
            command,
            nodes=nodes,
            gpus=gpus,
            name=options.name,
            options=options.sbatch,
            python=options.python or sys.executable,
            setup=options.setup or "",
            folder=options.folder,
            start_timeout=options.start_timeout or LaunchPlan.start_deadline_s,
        )
    else:
        for key in _NODE_OPTIONS:
            if getattr(options, key) is not None:
                flag = f"--{key.replace('_', '-')}"
                parser.error(f"kubernetes: {flag} has no effect on pods; remove it and use --image")
        text = rayjob_manifest(
            _add_cluster_size(command, nodes, gpus),
            nodes=nodes,
            gpus=gpus,
            name=options.name,
            image=options.image,
            namespace=options.namespace,
            volumes=options.volume,
            env_from=options.env_secret,
            cpus=options.cpus,
            memory=options.memory,
        )
    suffix = "sbatch" if is_slurm else "yaml"
    file = options.out or f"{options.name}.{suffix}"
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(text, encoding="utf-8", errors="backslashreplace")
    if not is_slurm:
        _write_line(f"wrote {file}; start it: kubectl create -f {shlex.quote(file)}")
    elif not options.submit:
        _write_line(f"wrote {file}; start it: sbatch {shlex.quote(file)}")
    elif shutil.which("sbatch") is None:
        raise LaunchError(f"wrote {file}; --submit needs sbatch, which is not on this machine")
    else:
        _write_line(f"wrote {file}")
        return subprocess.run(["sbatch", file], check=False).returncode
    return 0


def jobs(arguments: Sequence[str]) -> int:
    """Runs `hone jobs`."""
    parser = argparse.ArgumentParser(
        prog="hone jobs",
        description="List, follow and stop the jobs of a Ray cluster; by default of the newest "
        "`hone launch` whose head is this machine.",
        allow_abbrev=False,
    )
    parser.add_argument("--address", help="address of the job server, as in http://127.0.0.1:8265")
    verbs = parser.add_subparsers(dest="verb")
    verbs.add_parser("list", help="list all jobs (the default)")
    for verb, help_text in (("logs", "print and follow a job's log"), ("stop", "stop a job")):
        verbs.add_parser(verb, help=help_text).add_argument(
            "job", nargs="?", help="job (default: the newest)"
        )
    options = parser.parse_args(list(arguments))
    address, head_folder = (options.address, None) if options.address else _newest_launch()
    from hone.launch.jobs import CLIENT_ERRORS

    try:
        return _run_jobs_verb(address, options.verb, getattr(options, "job", None), head_folder)
    except CLIENT_ERRORS as error:
        raise LaunchError(
            f"the job server {address} does not answer; its cluster may have ended: {error}"
        ) from error


def _run_jobs_verb(
    address: str, verb: str | None, job: str | None, head_folder: Path | None
) -> int:
    from hone.launch.jobs import SHORT_RETRY_DEADLINE_S, JobClient

    try:
        client = JobClient(address)
    except ValueError as error:
        raise LaunchError(
            f"--address {address}: {error}; give the URL of a job server, as in http://127.0.0.1:8265"
        ) from error
    client.retry_deadline_s = SHORT_RETRY_DEADLINE_S
    entries = client.list_jobs()
    if verb in (None, "list"):
        for entry in entries:
            start = datetime.fromtimestamp((entry.start_time or 0) / 1000, timezone.utc)
            _write_line(
                f"{entry.submission_id}  {entry.status.value:<9}  {start:%F %T}  {entry.entrypoint}"
            )
        return 0
    job_ids = [str(entry.submission_id) for entry in entries if entry.submission_id]
    if not job_ids:
        raise LaunchError(f"{address} has no jobs")
    job_id = job or job_ids[-1]
    if job_id not in job_ids:
        raise LaunchError(f"{address} has no job {job_id}; it has {', '.join(job_ids)}")
    if verb == "logs":
        with _keep_cluster_alive(head_folder):
            return client.follow(job_id, _write_and_flush)
    _write_line(f"stopping {job_id}" if client.stop(job_id) else f"{job_id} has already ended")
    return 0


@contextlib.contextmanager
def _keep_cluster_alive(head_folder: Path | None) -> Iterator[None]:
    """Keeps a cluster of `hone launch` running inside the block, so that a log can be read to its end."""
    try:
        with contextlib.ExitStack() as stack:
            if head_folder is not None:
                with contextlib.suppress(OSError):  # the cluster is stopping
                    lock = stack.enter_context(
                        open(head_folder / LOG_READERS_FILE, "a", encoding="utf-8")
                    )
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield
    except KeyboardInterrupt:
        _write_line("the job keeps running; stop it with: hone jobs stop")
        raise


def _newest_launch() -> tuple[str, Path]:
    """Returns the job server and the folder of the newest cluster whose head is this machine.

    Sets Ray's environment variables to the token of that cluster.
    """
    clusters = []
    for file in launch_folder().glob(f"*/{HEAD_FOLDER}/{CLUSTER_FILE}"):
        with contextlib.suppress(OSError, ValueError):  # the cluster is starting or stopping
            cluster = json.loads(file.read_text("utf-8"))
            if _head_runs_here(cluster):
                clusters.append((file.stat().st_mtime, cluster, file.parent))
    if not clusters:
        raise LaunchError(
            "no cluster of `hone launch` has its head on this machine; give --address, and set "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
        )
    _, cluster, folder = max(clusters, key=lambda entry: entry[0])
    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": cluster["token_file"]}
    return str(cluster["jobs"]), folder


def _head_runs_here(cluster: Fields) -> bool:
    """Whether the head of this cluster runs on this machine.

    A shared home may have files of clusters that run elsewhere or have ended.
    """
    if cluster.get("host") != socket.gethostname():
        return False
    return b"hone.launch.node" in Path(f"/proc/{cluster.get('pid')}/cmdline").read_bytes()
