"""Joins a Ray cluster, or starts one on this machine that listens on loopback and requires a token.

An existing cluster keeps its own authentication. The processes of a cluster that is started here
have a mark in their environment, by which reaper.py finds and kills them.
"""

from __future__ import annotations

import atexit
import ipaddress
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import ray
from ray.exceptions import AuthenticationError

from hone.controller.ray_liveness import RAY_PROCESSES, cluster_failed, stop_watch, watch_cluster
from hone.launch import reaper
from hone.launch.ray_environment import LOOPBACK_ENV, allow_slow_start
from hone.launch.ray_private import (
    fixed_agent_ports,
    log_raylet_messages,
    loopback_only,
    reload_settings,
)
from hone.types import Settings

logger = logging.getLogger(__name__)

TOKEN_ENV = "RAY_AUTH_TOKEN"
STOP_DEADLINE_S = 30.0
CONNECT_DEADLINE_S = 10.0
_DRIVER_ENV = {
    # ray_liveness.py reports a lost control plane; Ray would end this process without that message.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@dataclass(frozen=True)
class OwnCluster:
    """A cluster that this process started; `reaper` kills it after this process has ended."""

    mark: str
    folder: str
    """A folder that only this user can access. It contains Ray's session folder, which Ray itself makes
    writable by all users."""
    reaper: subprocess.Popen[bytes]


_own_cluster: OwnCluster | None = None


def start_ray(ray_init: Settings, report: Callable[[str], None] = logger.info) -> bool:
    """Joins or starts a cluster with these `ray.init` options; returns False if Ray already runs.

    `report` receives a status message.
    """
    if ray.is_initialized():
        return False
    options = {key: value for key, value in ray_init.items() if value is not None}
    options = {"include_dashboard": False, "logging_level": logging.WARNING, **options}
    for name, value in _DRIVER_ENV.items():
        os.environ.setdefault(name, value)
    allow_slow_start()
    log_raylet_messages(logger)
    if joins_cluster(ray_init):
        _join_cluster(options, report)
    else:
        _start_cluster({**options, "address": "local"}, report)
    return True


def stop_ray(timeline_json_file: str | None = None) -> None:
    """Writes Ray's timeline if a file is given, disconnects, and stops a cluster started here."""
    global _own_cluster
    has_failed = cluster_failed()
    if timeline_json_file is not None and ray.is_initialized() and not has_failed:
        ray.timeline(filename=timeline_json_file)
    stop_watch()
    cluster, _own_cluster = _own_cluster, None
    if cluster is not None and has_failed:
        reaper.kill_marked_processes(cluster.mark)  # ray.shutdown would wait for a stopped process
    thread = threading.Thread(target=ray.shutdown, name="ray-shutdown", daemon=True)
    thread.start()
    thread.join(STOP_DEADLINE_S)
    if thread.is_alive():
        atexit.unregister(ray.shutdown)
        logger.warning("ray.shutdown has not returned within %g s", STOP_DEADLINE_S)
    if cluster is not None:
        reaper.kill_marked_processes(cluster.mark)
        cluster.reaper.kill()
        cluster.reaper.wait()
        if not has_failed:  # the logs of a failure are kept
            shutil.rmtree(cluster.folder, ignore_errors=True)


def check_reachable(address: str | None, key: str) -> None:
    """Raises ConnectionError if nothing listens at the address; Ray itself would retry for minutes.

    `key` names the setting of the address in the message.
    """
    if not address or address in ("auto", "local"):
        return
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(f"{key}={address}: give host:port, ray://host:port, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_DEADLINE_S).close()
    except OSError as error:
        raise ConnectionError(
            f"{key}={address}: nothing answers there within {CONNECT_DEADLINE_S:g} s ({error}); start "
            "the cluster with `ray start --head`, or remove the address to start one here"
        ) from error


def joins_cluster(ray_init: Settings) -> bool:
    """Whether `start_ray` finds a cluster: one that runs in this process, the address in the options or in
    RAY_ADDRESS, or one that `ray start` started here.

    With `num_cpus` or `num_gpus`, a cluster of `ray start` is ignored.
    """
    if ray.is_initialized():
        return True
    for value, key in (
        (ray_init.get("address"), "ray_kwargs.ray_init.address"),
        (os.environ.get("RAY_ADDRESS"), "RAY_ADDRESS"),
    ):
        if value:
            check_reachable(value, key)
            return value != "local"
    path = os.path.join(os.environ.get("RAY_TMPDIR") or "/tmp", "ray", "ray_current_cluster")
    sets_resources = any(ray_init.get(name) is not None for name in ("num_cpus", "num_gpus"))
    if sets_resources or not os.path.exists(path):
        return False
    if os.stat(path).st_uid not in (0, os.getuid()):
        return False  # a file of another user may name the cluster of that user
    with open(path, encoding="utf-8") as file:
        cluster_address = file.read().strip()
    try:
        check_reachable(cluster_address, path)
    except (ConnectionError, ValueError):
        logger.warning(
            "the Ray cluster %s in %s has ended; starting a new one", cluster_address, path
        )
        return False
    return bool(cluster_address)


def _join_cluster(options: Settings, report: Callable[[str], None]) -> None:
    reload_settings()
    address = options.get("address") or os.environ.get("RAY_ADDRESS") or "of this machine"
    report(f"joining the Ray cluster {address}")
    try:
        with _keep_sigterm_handler():
            ray.init(**options)
    except AuthenticationError as error:
        raise ConnectionError(
            f"the Ray cluster {address} did not accept the token of this process: set "
            "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token"
        ) from error
    watch_cluster({})


def _start_cluster(options: Settings, report: Callable[[str], None]) -> None:
    global _own_cluster
    mark = secrets.token_hex(8)
    folder = tempfile.mkdtemp(prefix="hone-ray-", dir=os.environ.get("RAY_TMPDIR"))
    _own_cluster = OwnCluster(mark, folder, reaper.start_reaper(mark))
    variables = {
        "RAY_AUTH_MODE": "token",
        TOKEN_ENV: os.environ.get(TOKEN_ENV) or secrets.token_hex(32),
        **reaper.marked_environment(mark),
        LOOPBACK_ENV: "0",
        "RAY_prestart_worker_first_driver": "0",  # prestarted workers would lack the worker environment
    }
    report("starting Ray on this machine")
    try:
        with (
            _ray_environment(variables),
            loopback_only(),
            _keep_sigterm_handler(),
            fixed_agent_ports(),
        ):
            reload_settings()
            context = ray.init(**{"_temp_dir": os.path.join(folder, "ray"), **options})
    except BaseException:
        stop_ray()
        raise
    address = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(address).is_loopback:
        logger.warning("Ray listens on %s, not only on loopback; a token protects it", address)
    pid_by_name = {}
    for pid in reaper.marked_pids(mark):
        with suppress(OSError), open(f"/proc/{pid}/comm", encoding="utf-8") as file:
            pid_by_name[file.read().strip()] = pid
    ray_pids = {name: pid_by_name[name] for name in RAY_PROCESSES if name in pid_by_name}
    watch_cluster(ray_pids, os.path.join(context.address_info["session_dir"], "logs"))


@contextmanager
def _ray_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables and restores them at the end of the block, so that processes that are
    started later do not inherit the token.
    """
    previous_values = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous_values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Restores the program's SIGTERM handler, which `ray.init` replaces."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
