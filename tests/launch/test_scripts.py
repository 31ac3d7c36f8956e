"""What schedulers get: the sbatch script runs with programs in SLURM's place, the manifest fits."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import yaml

from hone.launch import LaunchError
from hone.launch.scripts import entrypoint_without_quotes, rayjob_manifest, sbatch_script

ODD = [
    "hone",
    "train",
    "data.files=[a,b]",
    "x='it''s'",
    'y="$HOME"',
    "z=`id`",
    "a b",
    "*",
    "",
    "-n",
]


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(text)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def slurm(folder: Path, script: str) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a script in an allocation of two nodes."""
    program(folder / "bin", "scontrol", "#!/bin/bash\nprintf '%s\\n' node1 node2\n")
    (folder / "job.sbatch").write_text(script)
    environment = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "node[1-2]"}
    return ["bash", str(folder / "job.sbatch")], environment


def script_of(command: list[str], python: Path, **options: Any) -> str:
    usual: dict[str, Any] = {"nodes": 2, "gpus": 8, "name": "run 1", "options": [], "setup": ""}
    usual |= {"folder": None, "start_timeout": 300.0}
    return sbatch_script(command, python=str(python), **usual | options)


def test_odd_arguments_reach_the_launch_unchanged(tmp_path: Path) -> None:
    python = program(
        tmp_path,
        "a python",
        f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv))\n"
        "place = sys.argv.index('--hosts') + 1\nprint(json.dumps(open(sys.argv[place]).read()))\n",
    )
    command, environment = slurm(
        tmp_path, script_of(ODD, python, setup="export A='b c'", folder="/a b")
    )
    assert subprocess.run(["bash", "-n", command[1]], check=True).returncode == 0
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    words, hosts = (json.loads(line) for line in done.stdout.splitlines())
    assert words[words.index("--") + 1 :] == ODD
    assert words[1:6] == ["-m", "hone.cli", "launch", "--nodes=2", "--gpus-per-node=8"]
    assert words[6:9] == ["--setup=export A='b c'", "--folder=/a b", "--start-timeout=300"]
    assert hosts == "node1\nnode2\n"


def test_a_setup_line_may_use_unset_names_and_fail_in_part(tmp_path: Path) -> None:
    python = program(tmp_path, "python", "#!/bin/bash\necho launched\n")
    script = script_of(["hone"], python, setup='false; export A="$UNSET"')
    command, environment = slurm(tmp_path, script)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "launched\n"


def test_signals_go_to_the_launch_and_its_status_is_the_script_s(tmp_path: Path) -> None:
    python = program(
        tmp_path,
        "python",
        f"#!{sys.executable}\nimport os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(5))\n"
        "os.write(1, b'up\\n')\ntime.sleep(600)\n",
    )
    command, environment = slurm(tmp_path, script_of(["hone", "train"], python))
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "up\n"
        script.send_signal(signal.SIGTERM)
        script.send_signal(signal.SIGTERM)
        assert script.wait(60) == 5


def test_directives_come_first_and_a_line_break_is_refused() -> None:
    script = script_of(["hone", "train"], Path("python"), options=["--partition=gpu"], gpus=0)
    lines = script.splitlines()
    directives = [line for line in lines if line.startswith("#SBATCH ")]
    assert lines[1 : 1 + len(directives)] == directives
    assert "#SBATCH --partition=gpu" in directives
    assert "#SBATCH --nodes=2" in directives
    assert "#SBATCH --job-name='run 1'" in directives
    assert not any("gpus" in line for line in directives)
    with pytest.raises(LaunchError, match="is not a line of an sbatch script"):
        script_of(["hone", "train"], Path("python"), options=["--comment=a\nrm -rf x"])


TEXT, COUNT, FLAG = (str,), (int,), (bool,)
QUANTITY = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?")
RESOURCES = {"limits": {"*": QUANTITY}, "requests": {"*": QUANTITY}}
VOLUME = {
    "name!": TEXT,
    "emptyDir": {"medium": TEXT},
    "persistentVolumeClaim": {"claimName!": TEXT},
}
CONTAINER = {
    "name!": TEXT,
    "image": TEXT,
    "resources": RESOURCES,
    "volumeMounts": [{"name!": TEXT, "mountPath!": TEXT}],
    "envFrom": [{"secretRef": {"name": TEXT}}],
}
TEMPLATE = {"spec": {"containers!": [CONTAINER], "volumes": [VOLUME]}}
GROUP = {"rayStartParams": {"*": TEXT}, "template!": TEMPLATE}
WORKERS = {"groupName!": TEXT, "replicas": COUNT, "minReplicas!": COUNT, "maxReplicas!": COUNT}
RAYJOB = {
    "apiVersion": TEXT,
    "kind": TEXT,
    "metadata": {"name": TEXT, "namespace": TEXT},
    "spec": {
        "entrypoint": TEXT,
        "shutdownAfterJobFinishes": FLAG,
        "ttlSecondsAfterFinished": COUNT,
        "backoffLimit": COUNT,
        "rayClusterSpec": {
            "rayVersion": TEXT,
            "authOptions": {"mode": re.compile("disabled|token")},
            "headGroupSpec!": GROUP,
            "workerGroupSpecs": [WORKERS | GROUP],
        },
    },
}
"""The fields of ray.io/v1 (KubeRay 1.5.1 and later) and of pods that a manifest may have; ! must be there."""


def unfit(value: Any, schema: Any, path: str = "") -> list[str]:
    if isinstance(schema, re.Pattern):
        fits = type(value) in (str, int) and schema.fullmatch(str(value))
        return [] if fits else [f"{path}: {value!r}"]
    if isinstance(schema, tuple):
        return [] if type(value) in schema else [f"{path}: {value!r}"]
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [path]
        return [p for i, entry in enumerate(value) for p in unfit(entry, schema[0], f"{path}/{i}")]
    required = {key[:-1] for key in schema if key.endswith("!")}
    schema = {key.removesuffix("!"): entry for key, entry in schema.items()}
    problems = [f"{path}/{key} is missing" for key in sorted(required - value.keys())]
    for key, entry in value.items():
        if key not in schema and "*" not in schema:
            problems.append(f"{path}/{key}")
        else:
            problems += unfit(entry, schema.get(key, schema.get("*")), f"{path}/{key}")
    return problems


def manifest(command: list[str], **options: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "nodes": 4,
        "gpus": 8,
        "name": "run-1",
        "image": "example.org/hone:1",
        "namespace": "rl",
        "volumes": ["shared:/data"],
        "env_from": ["keys"],
        "cpus": 16,
        "memory": "128Gi",
    }
    loaded: dict[str, Any] = yaml.safe_load(rayjob_manifest(command, **usual | options))
    return loaded


def test_the_manifest_has_only_fields_of_a_rayjob_and_asks_for_a_token() -> None:
    whole = manifest(["hone", "train", "trainer.nnodes=4"])
    assert unfit(whole, RAYJOB) == []
    assert (whole["apiVersion"], whole["kind"]) == ("ray.io/v1", "RayJob")
    cluster = whole["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 3
    for group in (cluster["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert unfit(whole | {"specs": {}}, RAYJOB) == ["/specs"]
    cluster["authOptions"]["mode"] = "open"
    workers["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] = "128 GB"
    del workers["maxReplicas"]
    assert [problem.rpartition("/")[2] for problem in unfit(whole, RAYJOB)] == [
        "mode: 'open'",
        "maxReplicas is missing",
        "memory: '128 GB'",
    ]
    assert "workerGroupSpecs" not in manifest(["hone"], nodes=1)["spec"]["rayClusterSpec"]


def closed(schema: Any) -> Any:
    """A schema of Kubernetes with unknown fields refused, as its server prunes them."""
    if isinstance(schema, list):
        return [closed(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(entry) for key, entry in schema.items()}
    if isinstance(made.get("properties"), dict) and not made.get(
        "x-kubernetes-preserve-unknown-fields"
    ):
        made.setdefault("additionalProperties", False)
    return made


@pytest.mark.skipif("HONE_RAYJOB_CRD" not in os.environ, reason="HONE_RAYJOB_CRD names no CRD")
def test_the_manifest_fits_the_crd_of_kuberay() -> None:
    """HONE_RAYJOB_CRD is KubeRay's ray.io_rayjobs.yaml."""
    jsonschema = pytest.importorskip("jsonschema")
    crd = yaml.safe_load(Path(os.environ["HONE_RAYJOB_CRD"]).read_text("utf-8"))
    (v1,) = [version for version in crd["spec"]["versions"] if version["name"] == "v1"]
    schema = closed(v1["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"].pop("additionalProperties", None)
    check = jsonschema.Draft7Validator(schema)
    whole = manifest(["hone", "train", "trainer.nnodes=4"])
    for fit in (
        whole,
        manifest(["hone"], nodes=1, gpus=0, namespace=None, volumes=[], env_from=[]),
    ):
        assert [error.message for error in check.iter_errors(fit)] == []
    for path in ("spec", "spec/rayClusterSpec", "spec/rayClusterSpec/headGroupSpec/template/spec"):
        unfit_one = copy.deepcopy(whole)
        position = functools.reduce(lambda at, key: at[key], path.split("/"), unfit_one)
        position["unknown"] = 1
        assert not check.is_valid(unfit_one)


def test_a_plain_command_stays_readable_and_an_odd_one_survives_every_shell() -> None:
    assert entrypoint_without_quotes(["hone", "train", "a=1"]) == "python -m hone.cli train a=1"
    entrypoint = entrypoint_without_quotes(
        [sys.executable, "-c", "import sys; print(sys.argv[1:])", *ODD]
    )
    assert all(shlex.quote(word) == word for word in entrypoint.split())
    line = entrypoint.replace("python", sys.executable, 1)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout == f"{ODD!r}\n"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"name": "Run_1"}, "at most 47 characters"),
        ({"name": "1run"}, "the first one a letter"),
        ({"volumes": ["shared"]}, "CLAIM:/PATH"),
        ({"volumes": ["a:/x", "b:/x/"]}, "/x is mounted twice"),
        ({"volumes": ["a:/dev/shm"]}, "/dev/shm is mounted twice"),
        ({"memory": "128GB"}, "for example 256Gi"),
        ({"name": "run-"}, "the last one not -"),
        ({"cpus": 0}, "--cpus 0: give at least 1"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(LaunchError, match=problem):
        manifest(["hone", "train"], **options)


def test_a_manifest_without_ray_on_this_machine_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("hone.launch.scripts.version", missing)
    with pytest.raises(LaunchError, match="pip install"):
        manifest(["hone", "train"])
