"""Generates an sbatch script for SLURM and a RayJob manifest for KubeRay."""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Sequence
from importlib.metadata import version

import yaml

from hone.config.errors import ConfigError
from hone.types import Fields

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?")
"""A Kubernetes name of at most 47 characters; KubeRay appends to it, up to 63."""
_BYTES = re.compile(r"\d+(\.\d+)?([KMGTPE]i|[kMGTPE])?")


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
    """Returns a batch script that starts Ray on its nodes and runs the command."""
    words = [*options, name]
    if invalid := [word for word in words if not word or "\n" in word or "\r" in word]:
        raise ConfigError(f"{invalid[0]!r} is not a line of an sbatch script")
    directives = [f"--job-name={shlex.quote(name)}", f"--nodes={nodes}", "--ntasks-per-node=1"]
    directives += [f"--gpus-per-node={gpus}"] if gpus else []
    # SLURM sends SIGTERM 120 s before the time limit, so that the job can save.
    directives += ["--exclusive", "--output=%x-%j.log", "--signal=B:TERM@120", *options]
    launch = [python, "-m", "hone.cli", "launch", f"--nodes={nodes}", f"--gpus-per-node={gpus}"]
    launch += [f"--setup={setup}"] if setup else []
    launch += [f"--folder={folder}"] if folder else []
    launch.append(f"--start-timeout={start_timeout:g}")
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in directives),
            *filter(None, [setup]),  # before `set`: the setup may read unset variables
            "set -euo pipefail",
            "hosts=$(mktemp)",
            "trap 'rm -f \"$hosts\"' EXIT",
            'scontrol show hostnames "$SLURM_JOB_NODELIST" > "$hosts"',
            "# The launch process gets the signals; it stops the job and then Ray.",
            f'{shlex.join(launch)} srun --hosts "$hosts" -- {shlex.join(command)} &',
            "launch=$!",
            "trap 'kill -TERM \"$launch\"' TERM INT",
            "status=0",
            'wait "$launch" || status=$?',
            'while kill -0 "$launch" 2>/dev/null; do status=0; wait "$launch" || status=$?; done',
            'exit "$status"',
            "",
        ]
    )


def _check_kubernetes(name: str, memory: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--name {name}: use at most 47 characters of a-z, 0-9 and -, the first one a letter"
        )
    if not _BYTES.fullmatch(memory):
        raise ConfigError(f"--memory {memory}: give a quantity of Kubernetes, for example 256Gi")


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
    """Returns a KubeRay RayJob: a cluster of `nodes` pods, which stops after the job."""
    _check_kubernetes(name, memory)
    mounts = [_volume(i, text) for i, text in enumerate(volumes)]

    def pod(container: str) -> Fields:
        limits: Fields = {"cpu": str(cpus), "memory": memory}
        limits |= {"nvidia.com/gpu": gpus} if gpus else {}
        shm = {"name": "shm", "mountPath": "/dev/shm"}
        content: Fields = {
            "name": container,
            "image": image,
            "resources": {"limits": limits, "requests": dict(limits)},
            "volumeMounts": [shm, *(dict(mount) for _, mount in mounts)],
        }
        if env_from:
            content["envFrom"] = [{"secretRef": {"name": secret}} for secret in env_from]
        memory_disk = {"name": "shm", "emptyDir": {"medium": "Memory"}}
        return {
            "spec": {
                "containers": [content],
                "volumes": [memory_disk, *(dict(volume) for volume, _ in mounts)],
            }
        }

    cluster: Fields = {
        "rayVersion": version("ray"),
        "authOptions": {"mode": "token"},
        "headGroupSpec": {"rayStartParams": {}, "template": pod("ray-head")},
    }
    if nodes > 1:
        counts = dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), nodes - 1)
        workers: Fields = {"groupName": "workers", **counts, "rayStartParams": {}}
        cluster["workerGroupSpecs"] = [{**workers, "template": pod("ray-worker")}]
    metadata: Fields = {"name": name} | ({"namespace": namespace} if namespace else {})
    spec: Fields = {
        "entrypoint": entrypoint_without_quotes(command),
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 300,
        "backoffLimit": 0,
        "rayClusterSpec": cluster,
    }
    manifest = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": spec}
    readable = json.dumps(list(command), ensure_ascii=True)
    return f"# command: {readable}\n" + yaml.safe_dump(manifest, sort_keys=False)


def _volume(number: int, text: str) -> tuple[Fields, Fields]:
    claim, colon, path = text.partition(":")
    if not (colon and claim and path.startswith("/")):
        raise ConfigError(
            f"--volume {text}: give CLAIM:/PATH, a persistent volume claim and a mount path"
        )
    name = f"volume-{number}"
    volume: Fields = {"name": name, "persistentVolumeClaim": {"claimName": claim}}
    return volume, {"name": name, "mountPath": path}


def entrypoint_without_quotes(command: Sequence[str]) -> str:
    """Returns the command without shell characters, because KubeRay and Ray both quote it again."""
    words = list(command)
    words[:1] = ["python", "-m", "hone.cli"] if words[0] == "hone" else words[:1]
    if all(shlex.quote(word) == word for word in words):
        return " ".join(words)
    encoded = base64.urlsafe_b64encode(json.dumps(words).encode()).decode()
    return f"python -m hone.launch.encoded {encoded}"
