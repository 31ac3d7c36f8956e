"""`hone launch`: what it refuses, and real clusters of several raylets on this machine."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from hone import cli
from hone.launch import LaunchError
from hone.launch.command import _add_cluster_size, _newest_launch
from hone.launch.free_ports import free_ports

from .test_scripts import program

ROOT = Path(__file__).resolve().parents[2]
BARE = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
JOB = """
import os, ray, signal, sys, time
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
ray.init(log_to_driver=False)
@ray.remote(num_cpus=1)
def here(): return ray.get_runtime_context().get_node_id()
nodes = [node["NodeID"] for node in ray.nodes()]
if len(nodes) == 3:
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    nodes = set(ray.get([here.options(scheduling_strategy=place).remote() for place in places]))
print("nodes", len(nodes), "folder", os.getcwd(), "word", sys.argv[2], flush=True)
def stopped(*_):
    print("saved", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, stopped)
if sys.argv[1] == "wait":
    print("waits", flush=True)
    time.sleep(600)
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["local"], "write the command after --"),
        (["--nodes", "0", "local", "--", "hone"], "at least 1"),
        (["slurm", "--", "hone", "train"], "give --nodes"),
        (["--nodes", "2", "moon", "--", "hone"], "invalid choice"),
        (["ssh", "--hosts", "HOSTS", "--nodes", "9", "--", "hone"], "unrecognized"),
        (["--nodes", "9", "ssh", "--hosts", "HOSTS", "--", "hone"], "names 2 hosts"),
        (["ssh", "--hosts", "ODD", "--", "hone"], "not a host name"),
        (["--start-timeout", "0", "local", "--", "hone"], "more than 0"),
        *(
            (["--nodes", "2", flag, "9", "kubernetes", "--image", "x", "--", "hone"], flag)
            for flag in ("--setup", "--python", "--folder", "--start-timeout")
        ),
    ],
)
def test_what_cannot_be_launched_is_refused(
    words: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "HOSTS").write_text("# head first\nnode1\n\nnode2\n")
    (tmp_path / "ODD").write_text("-oProxyCommand=id\n")
    places = {name: str(tmp_path / name) for name in ("HOSTS", "ODD")}
    try:
        status = cli.main(["launch", *(places.get(word, word) for word in words)])
    except SystemExit as error:
        status = int(str(error.code))
    assert status == 2
    output = capsys.readouterr()
    assert problem in output.err + output.out


def test_a_training_command_gets_the_size_of_the_cluster_unless_it_sets_it() -> None:
    sizes = ["trainer.nnodes=2", "trainer.n_gpus_per_node=8"]
    assert _add_cluster_size(["hone", "train", "a=1"], 2, 8) == ["hone", "train", "a=1", *sizes]
    module = ["python", "-m", "hone.trainer.main_ppo"]
    assert _add_cluster_size([*module, "trainer.nnodes=1"], 2, None) == [
        *module,
        "trainer.nnodes=1",
    ]
    installed = ["/env/bin/hone", "train", "a=1"]
    assert _add_cluster_size(installed, 2, 8) == [*installed, *sizes]
    for module_name in (
        "verl.trainer.main_ppo",
        "recipe.dapo.main_dapo",
        "hone.recipe.prime.main_prime",
    ):
        command = ["env", "A=1", "python3", "-u", "-m", module_name]
        assert _add_cluster_size(command, 2, 8) == [*command, *sizes]
    for command in (
        ["python", "x.py", "train"],
        ["python", "-m"],
        ["python", "-m", "recipe.spin.main_spin"],
    ):
        assert _add_cluster_size(command, 2, 8) == command


class Server:
    """Stands for the job server: two jobs, the newer one running."""

    stopped: ClassVar[list[str]] = []

    def __init__(self, address: str) -> None:
        assert address == "http://127.0.0.1:1"

    def list_jobs(self) -> list[Any]:
        states = {"one": "SUCCEEDED", "two": "RUNNING"}
        return [
            SimpleNamespace(
                submission_id=name,
                status=SimpleNamespace(value=state),
                start_time=0,
                entrypoint="x",
            )
            for name, state in states.items()
        ]

    def follow(self, job: str, write: Callable[[str], None]) -> int:
        write(f"log of {job}\n")
        return 3

    def stop(self, job: str) -> bool:
        self.stopped.append(job)
        return job == "two"


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ([], 0, "two  RUNNING"),
        (["list"], 0, "one  SUCCEEDED"),
        (["logs"], 3, "log of two"),
        (["logs", "one"], 3, "log of one"),
        (["stop"], 0, "stopping two"),
        (["stop", "one"], 0, "one has already ended"),
        (["stop", "three"], 2, "no job three; it has one, two"),
    ],
)
def test_jobs_are_listed_followed_and_stopped_the_newest_by_default(
    words: list[str],
    status: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr("hone.launch.jobs.JobClient", Server)
    assert cli.main(["jobs", "--address", "http://127.0.0.1:1", *words]) == status
    output = capsys.readouterr()
    assert told in output.out + output.err


def test_a_slurm_script_has_the_folder_and_the_deadline_of_the_launch(tmp_path: Path) -> None:
    out = tmp_path / "x.sbatch"
    words = ["--nodes", "2", "--folder", "/shared/work", "--start-timeout", "900"]
    assert cli.main(["launch", *words, "slurm", "--out", str(out), "--", "hone", "train"]) == 0
    assert "--folder=/shared/work --start-timeout=900 srun" in out.read_text()


def test_the_newest_launch_is_one_that_runs_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "before")
    here = socket.gethostname()
    waiting = [sys.executable, "-c", "input('up\\n')", "hone.launch.node"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(waiting, text=True, **pipes) as node:
        assert node.stdout is not None
        assert node.stdout.readline() == "up\n"  # before, its command line is this process's
        entries = [(here, node.pid), (here, os.getpid()), ("elsewhere", node.pid), (here, 2**30)]
        for age, (host, pid) in enumerate(entries):
            head = tmp_path / ".hone" / "launch" / str(age) / "head"
            head.mkdir(parents=True)
            cluster = {
                "jobs": f"http://127.0.0.1:{age}",
                "token_file": "t",
                "host": host,
                "pid": pid,
            }
            (head / "cluster.json").write_text(json.dumps(cluster))
            os.utime(head / "cluster.json", (age, age))
        address, folder = _newest_launch()
        assert (address, folder.parent.name) == ("http://127.0.0.1:0", "0")
        node.communicate("\n")
    with pytest.raises(LaunchError, match="give --address"):
        _newest_launch()


def test_jobs_without_a_launch_say_what_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.main(["jobs"]) == 2
    output = capsys.readouterr()
    assert "give --address" in output.out + output.err


def test_an_address_of_jobs_that_is_no_url_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["jobs", "--address", "head-node", "list"]) == 2
    output = capsys.readouterr()
    assert "--address head-node: " in output.out + output.err
    assert "as in http://127.0.0.1:8265" in output.out + output.err


@contextmanager
def launched(
    words: list[str], folder: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """A launch whose home is `folder`; afterwards nothing of it may run."""
    (folder / "job.py").write_text(JOB)
    process = subprocess.Popen(
        [sys.executable, "-m", "hone.cli", "launch", *words],
        cwd=folder,
        env=BARE | {"HOME": str(folder)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def jobs(home: Path, verb: str) -> subprocess.Popen[str]:
    """`hone jobs` of the launch with this home."""
    return subprocess.Popen(
        [sys.executable, "-m", "hone.cli", "jobs", verb],
        env=BARE | {"HOME": str(home)},
        stdout=subprocess.PIPE,
        text=True,
    )


def command_lines() -> str:
    texts = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            texts.append(file.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(texts)


def processes_of(folder: Path) -> list[int]:
    """Processes whose environment has this home."""
    entry, pids = f"HOME={folder}".encode(), []
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            if entry in file.read_bytes().split(b"\0"):
                pids.append(int(file.parent.name))
        except OSError:
            continue
    return pids


def assert_nothing_runs(folder: Path) -> None:
    """A killed process may be seen for a while on a busy machine."""
    deadline = time.monotonic() + 120
    while (pids := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert pids == []


def addresses_listened_on(pids: list[int]) -> set[str]:
    inodes = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(file)))
            except OSError:
                continue
    addresses = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                addresses.add(fields[1].rpartition(":")[0])
    return addresses


@pytest.mark.slow
def test_three_local_raylets_from_a_bare_shell_end_with_ctrl_c(tmp_path: Path) -> None:
    words = ["local", "--", "python", "job.py", "wait", "it's $HOME"]
    with launched(words, tmp_path, {}) as launch:
        assert launch.stdout is not None
        lines = []
        for line in launch.stdout:
            lines.append(line)
            if line == "waits\n":
                break
        assert f"nodes 3 folder {tmp_path} word it's $HOME\n" in lines, "".join(lines)
        token_file = next(tmp_path.glob(".hone/launch/*/head/token"))
        assert token_file.stat().st_mode & 0o777 == 0o600
        assert token_file.read_text() not in command_lines()
        loopback = {"0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F"}
        assert addresses_listened_on(processes_of(tmp_path)) <= loopback
        with jobs(tmp_path, "logs") as follower, jobs(tmp_path, "logs") as another:
            for process in (follower, another):
                assert process.stdout is not None
                assert any(line == "waits\n" for line in process.stdout)
            another.send_signal(signal.SIGINT)
            listed, _ = jobs(tmp_path, "list").communicate(timeout=120)
            assert "RUNNING" in listed
            assert "the job keeps running" in another.communicate(timeout=120)[0]
            launch.send_signal(signal.SIGINT)
            rest, _ = launch.communicate(timeout=180)
            followed, _ = follower.communicate(timeout=120)
        assert "saved\n" in rest
        assert followed == "saved\n"
        # As a shell tells Ctrl-C; Ray keeps no status of a stopped job.
        assert [p.returncode for p in (launch, follower, another)] == [130] * 3
        assert token_file.parent.parent.exists() is False
    time.sleep(1)
    assert_nothing_runs(tmp_path)


@pytest.mark.slow
def test_an_sbatch_script_runs_a_real_cluster_and_has_the_job_s_status(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    program(programs, "scontrol", "#!/bin/bash\nprintf '%s\\n' node1 node2\n")
    program(
        programs,
        "srun",
        '#!/bin/bash\necho "$*" >> "$HOME/srun.log"\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    )
    program(programs, "sbatch", '#!/bin/bash\nSLURM_JOB_NODELIST="node[1-2]" exec bash "$1"\n')
    words = ["--nodes", "2", "--gpus-per-node", "0", "slurm", "--submit", "--"]
    environment = {"PATH": f"{programs}:/usr/bin:/bin"}
    command = ["python", "job.py", "end", 'a "b" $c']
    with launched([*words, *command], tmp_path, environment) as launch:
        output, _ = launch.communicate(timeout=300)
    assert f'nodes 2 folder {tmp_path} word a "b" $c\n' in output, output
    assert launch.returncode == 3
    assert "requires a token" in output
    log = (tmp_path / "srun.log").read_text()
    assert "--nodelist=node1" in log
    assert "--nodelist=node2" in log
    assert_nothing_runs(tmp_path)


def sshd_command(folder: Path, port: int) -> list[str] | None:
    """The command of an SSH server with keys of its own; None where none can run."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if sshd is None or shutil.which("ssh-keygen") is None or shutil.which("ssh") is None:
        return None
    for key in ("host", "user"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(make, check=True)
    options = [f"Port={port}", "ListenAddress=127.0.0.1", "StrictModes=no", "PidFile=none"]
    options += [f"HostKey={folder / 'host'}", f"AuthorizedKeysFile={folder / 'user.pub'}"]
    options += ["PasswordAuthentication=no", "UsePAM=no"]
    command = [sshd, "-f", "/dev/null", *(w for option in options for w in ("-o", option))]
    # Debian's needs /run/sshd, which its service makes.
    return command if subprocess.run([*command, "-t"], check=False).returncode == 0 else None


@contextmanager
def ssh_on_path(folder: Path) -> Iterator[Path]:
    """A folder with an `ssh` to this machine: through a real sshd, else by running the line here."""
    (port,) = free_ports(1)
    server = sshd_command(folder, port)
    if server is None:
        local = '#!/bin/bash\nwhile [[ $1 != -- ]]; do shift; done\nexec bash -c "$3"\n'
        yield program(folder / "bin", "ssh", local).parent
        return
    client = (
        f"#!/bin/bash\nexec {shutil.which('ssh')} -i {folder / 'user'} -p {port} -l {getpass.getuser()} "
        f"-o StrictHostKeyChecking=no -o UserKnownHostsFile={folder / 'known'} -o LogLevel=ERROR "
        f'"$@"\n'
    )
    with subprocess.Popen([*server, "-D", "-e"]) as daemon:
        try:
            yield program(folder / "bin", "ssh", client).parent
        finally:
            daemon.terminate()


@pytest.mark.slow
def test_nothing_is_left_on_the_hosts_of_ssh_when_the_launch_is_killed(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1\n")
    with ssh_on_path(tmp_path) as programs:
        environment = {"PATH": f"{programs}:/usr/bin:/bin"}
        words = ["--gpus-per-node", "0", "--setup", f"export PYTHONPATH={ROOT} HOME={tmp_path}"]
        words += ["ssh", "--hosts", "hosts", "--", "python", "job.py", "wait", "a  b"]
        with launched(words, tmp_path, environment) as launch:
            assert launch.stdout is not None
            lines = []
            for line in launch.stdout:
                lines.append(line)
                if line == "waits\n":
                    break
            assert f"nodes 1 folder {tmp_path} word a  b\n" in lines, "".join(lines)
            launch.kill()
        assert_nothing_runs(tmp_path)
    assert list(tmp_path.glob(".hone/launch/*")) == []
