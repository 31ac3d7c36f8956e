"""Generates an sbatch script for SLURM and a RayJob manifest for KubeRay."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import yaml

from hone.launch import LaunchError
from hone.types import Fields

_NAME_PATTERN = re.compile(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?")
"""A Kubernetes name of at most 47 characters; KubeRay appends up to 16 more."""
_QUANTITY_PATTERN = re.compile(r"\d+(\.\d+)?([KMGTPE]i|[kMGTPE])?")


def sbatch_script(
    command: Sequence[str],
    *,
    nodes: int,
    gpus: int,
    name: str,
    options: Sequence[str],
    python: str,
    setup: str,
    folder: str | None,
    start_timeout: float,
) -> str:
    """Returns a batch script that starts Ray on its nodes and runs the command; `gpus` is per node."""
    lines = [*options, name]
    if invalid_lines := [line for line in lines if not line or "\n" in line or "\r" in line]:
        raise LaunchError(f"{invalid_lines[0]!r} is not a line of an sbatch script")
    directives = [f"--job-name={shlex.quote(name)}", f"--nodes={nodes}", "--ntasks-per-node=1"]
    if gpus:
        directives.append(f"--gpus-per-node={gpus}")
    # SLURM sends SIGTERM 120 s before the time limit, so that the job can save.
    directives += ["--exclusive", "--output=%x-%j.log", "--signal=B:TERM@120", *options]
    launch_command = [python, "-m", "hone.cli", "launch"]
    launch_command += [f"--nodes={nodes}", f"--gpus-per-node={gpus}"]
    if setup:
        launch_command.append(f"--setup={setup}")
    if folder:
        launch_command.append(f"--folder={folder}")
    launch_command.append(f"--start-timeout={start_timeout:g}")
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in directives),
            *([setup] if setup else []),  # before `set`: the setup may read unset variables
            "set -euo pipefail",
            'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            "# exec: the signals go to the launch process, which stops the job and then Ray.",
            f"exec {shlex.join(launch_command)} srun --hosts /dev/fd/3 -- {shlex.join(command)} "
            '3<<< "$hosts"',
            "",
        ]
    )


def _check_manifest_values(name: str, memory: str, cpus: int, volumes: Sequence[str]) -> None:
    """Raises LaunchError if Kubernetes would reject one of the values."""
    mount_paths = ["/dev/shm", *(text.partition(":")[2].rstrip("/") for text in volumes)]
    if repeated_paths := [path for path in mount_paths if mount_paths.count(path) > 1]:
        raise LaunchError(f"--volume: {repeated_paths[0]} is mounted twice; name another path")
    if not _NAME_PATTERN.fullmatch(name):
        raise LaunchError(
            f"--name {name}: use at most 47 characters of a-z, 0-9 and -, the first one a letter and the "
            "last one not -"
        )
    if cpus < 1:
        raise LaunchError(f"--cpus {cpus}: give at least 1")
    if not _QUANTITY_PATTERN.fullmatch(memory):
        raise LaunchError(f"--memory {memory}: give a quantity of Kubernetes, for example 256Gi")


def rayjob_manifest(
    command: Sequence[str],
    *,
    nodes: int,
    gpus: int,
    name: str,
    image: str,
    namespace: str | None,
    volumes: Sequence[str],
    env_from: Sequence[str],
    cpus: int,
    memory: str,
) -> str:
    """Returns the manifest of a KubeRay RayJob: a cluster of `nodes` pods, which stops after the job.

    `gpus`, `cpus` and `memory` are per pod.
    """
    _check_manifest_values(name, memory, cpus, volumes)
    volumes_and_mounts = [_volume_and_mount(i, text) for i, text in enumerate(volumes)]

    limits: Fields = {"cpu": str(cpus), "memory": memory}
    if gpus:
        limits["nvidia.com/gpu"] = gpus
    pod_template = partial(
        _pod_template,
        image=image,
        limits=limits,
        env_from=env_from,
        volumes_and_mounts=volumes_and_mounts,
    )
    cluster: Fields = {
        "rayVersion": _ray_version(),
        "authOptions": {"mode": "token"},
        "headGroupSpec": {"rayStartParams": {}, "template": pod_template("ray-head")},
    }
    if nodes > 1:
        workers: Fields = {"groupName": "workers"}
        workers |= dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), nodes - 1)
        workers |= {"rayStartParams": {}, "template": pod_template("ray-worker")}
        cluster["workerGroupSpecs"] = [workers]
    metadata = {"name": name}
    if namespace:
        metadata["namespace"] = namespace
    spec: Fields = {
        "entrypoint": entrypoint_without_quotes(command),
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 300,
        "backoffLimit": 0,
        "rayClusterSpec": cluster,
    }
    manifest = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": spec}
    command_text = json.dumps(list(command), ensure_ascii=True)
    return f"# command: {command_text}\n" + yaml.safe_dump(manifest, sort_keys=False)


def _pod_template(
    container_name: str,
    *,
    image: str,
    limits: Fields,
    env_from: Sequence[str],
    volumes_and_mounts: Sequence[tuple[Fields, Fields]],
) -> Fields:
    """Returns the template of a pod with one container; `env_from` names secrets."""
    shm_mount = {"name": "shm", "mountPath": "/dev/shm"}
    container: Fields = {
        "name": container_name,
        "image": image,
        "resources": {"limits": dict(limits), "requests": dict(limits)},
        "volumeMounts": [shm_mount, *(dict(mount) for _, mount in volumes_and_mounts)],
    }
    if env_from:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in env_from]
    shm_volume = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    volumes = [shm_volume, *(dict(volume) for volume, _ in volumes_and_mounts)]
    return {"spec": {"containers": [container], "volumes": volumes}}


def _ray_version() -> str:
    try:
        return version("ray")
    except PackageNotFoundError:
        raise LaunchError(
            "the manifest names the version of Ray, which is not installed here: pip install 'hone-rl[ray]'"
        ) from None


def _volume_and_mount(number: int, text: str) -> tuple[Fields, Fields]:
    claim, colon, path = text.partition(":")
    if not (colon and claim and path.startswith("/")):
        raise LaunchError(
            f"--volume {text}: give CLAIM:/PATH, a persistent volume claim and a mount path"
        )
    name = f"volume-{number}"
    volume: Fields = {"name": name, "persistentVolumeClaim": {"claimName": claim}}
    return volume, {"name": name, "mountPath": path}


def entrypoint_without_quotes(command: Sequence[str]) -> str:
    """Returns the command without special characters of a shell, because KubeRay and Ray both quote it."""
    arguments = list(command)
    if arguments[0] == "hone":
        arguments[:1] = ["python", "-m", "hone.cli"]
    if all(shlex.quote(argument) == argument for argument in arguments):
        return " ".join(arguments)
    encoded = base64.urlsafe_b64encode(json.dumps(arguments).encode()).decode()
    return f"python -m hone.launch.scripts {encoded}"


if __name__ == "__main__":  # runs a command that `entrypoint_without_quotes` encoded
    command = json.loads(base64.urlsafe_b64decode(sys.argv[1]))
    os.execvp(command[0], command)
