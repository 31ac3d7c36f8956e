"""Ranks that a program starts itself: they end together, whatever ends them, and listen on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hone.tracking import read_metrics
from hone.trainer import ranks
from hone.trainer.ranks import LAUNCHER_PID_VARIABLE, launch

from .around_fixtures import sft_settings, tiny_model

pytestmark = pytest.mark.slow

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from hone.trainer.command_line import run_program
from hone.trainer.interrupt import GracefulStop

def main():
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    rank = os.environ["RANK"]
    if mode == "fail" and rank == "1":
        raise FileNotFoundError("rank 1 lacks a file")
    with GracefulStop() as stop:
        (folder / f"pid{rank}").write_text(str(os.getpid()))
        while mode != "quick" and not (stop.is_requested and mode != "deaf"):
            if stop.is_requested:
                (folder / f"asked{rank}").touch()
            time.sleep(0.01)
        if stop.is_requested:
            (folder / f"saved{rank}").touch()
            stop.raise_if_requested(1)

sys.exit(run_program(main))
"""
LAUNCH = """
import sys
from hone.trainer.command_line import run_program
from hone.trainer.ranks import launch
sys.exit(run_program(lambda: launch(2, "rank_program", sys.argv[1:])))
"""


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


class Launched:
    """A launcher with two ranks that do nothing but wait for a signal."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.folder = folder
        (folder / "rank_program.py").write_text(PROGRAM)
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(folder), mode],
            env={**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @property
    def pids(self) -> list[int]:
        texts = [file.read_text() for file in sorted(self.folder.glob("pid*"))]
        return [int(text) for text in texts if text]

    def ready(self) -> list[int]:
        wait_for(lambda: len(self.pids) == 2)
        return self.pids

    def saved(self) -> list[str]:
        return sorted(file.name for file in self.folder.glob("saved*"))


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[[str], Launched]]:
    launches: list[Launched] = []

    def go(mode: str) -> Launched:
        launches.append(Launched(tmp_path, mode))
        return launches[-1]

    yield go
    for each in launches:
        each.process.kill()
        each.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("whole_group", [False, True])
def test_one_signal_lets_every_rank_save_and_ends_with_its_code(
    launched: Callable[[str], Launched], number: signal.Signals, whole_group: bool
) -> None:
    run = launched("wait")
    pids = run.ready()
    (os.killpg if whole_group else os.kill)(run.process.pid, number)
    assert run.process.wait(timeout=60) == 128 + number
    assert run.saved() == ["saved0", "saved1"]
    assert not any(map(is_running, pids))


def test_a_second_signal_ends_ranks_that_do_not_end(launched: Callable[[str], Launched]) -> None:
    run = launched("deaf")
    pids = run.ready()
    run.process.send_signal(signal.SIGTERM)
    wait_for(lambda: len(list(run.folder.glob("asked*"))) == 2)  # else two signals may be one
    time.sleep(0.3)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(timeout=60) == 143
    wait_for(lambda: not any(map(is_running, pids)))


def test_ranks_die_with_their_launcher(launched: Callable[[str], Launched]) -> None:
    run = launched("deaf")
    pids = run.ready()
    run.process.kill()
    wait_for(lambda: not any(map(is_running, pids)))


def test_a_rank_whose_launcher_is_dead_already_ends(tmp_path: Path) -> None:
    program = "from hone.trainer.ranks import die_with_launcher as d; d(); print('alive')"
    environment = {**os.environ, LAUNCHER_PID_VARIABLE: "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True)
    assert (done.returncode, done.stdout) == (137, b"")


def test_a_rank_that_fails_ends_the_others_and_is_named(
    launched: Callable[[str], Launched],
) -> None:
    run = launched("fail")
    _, output = run.process.communicate(timeout=60)
    assert run.process.returncode == 2
    assert "FileNotFoundError: rank 1 lacks a file" in output
    assert "LaunchError: rank 1 ended with code 2; its message is above" in output
    assert not any(map(is_running, run.pids))


def test_a_signal_while_ranks_start_reaches_those_that_start_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(command, env=env))
        if len(started) == 1:
            signal.raise_signal(signal.SIGTERM)
        return started[-1]

    popen = SimpleNamespace(Popen=start)
    monkeypatch.setattr(ranks, "subprocess", popen)
    exit_codes = ranks._Processes().run(["sleep", "600"], [dict(os.environ)] * 2)
    assert exit_codes == {0: -signal.SIGTERM, 1: -signal.SIGTERM}


def test_ranks_that_end_well_end_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rank_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    launch(2, "rank_program", [str(tmp_path), "quick"])


def listening(pids: list[int]) -> set[str]:
    """The addresses on which these processes listen, in the kernel's hexadecimal."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(entry)
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    addresses = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                addresses.add(fields[1].partition(":")[0])
    return addresses


@pytest.mark.slow
def test_two_ranks_of_sft_listen_on_loopback_save_on_sigterm_and_die_with_their_launcher(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    settings = sft_settings(tmp_path, tiny_model(tmp_path / "model"))
    command = [sys.executable, "-m", "hone.trainer.main_sft", *settings]
    command += [f"trainer.default_local_dir={run}", "trainer.n_gpus_per_node=2"]
    command += ["trainer.total_training_steps=100000", "trainer.device=cpu"]

    def start() -> tuple[subprocess.Popen[bytes], list[int]]:
        before = len(read_metrics(run)) if (run / "metrics.jsonl").exists() else 0
        launcher = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
        wait_for(
            lambda: (
                launcher.poll() is not None
                or ((run / "metrics.jsonl").exists() and len(read_metrics(run)) > before)
            ),
            300,
        )
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
        return launcher, [int(pid) for pid in children.split()]

    launcher, ranks = start()
    try:
        assert len(ranks) == 2
        assert listening([launcher.pid, *ranks]) <= {"0100007F", "0" * 24 + "01000000"}
        second = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert second.returncode == 2
        assert f"FolderLocked: {run} is in use by" in second.stderr
        os.killpg(launcher.pid, signal.SIGTERM)
        assert launcher.wait(timeout=120) == 143
        steps = [line["step"] for line in read_metrics(run)]
        assert steps == list(range(1, len(steps) + 1))
        assert (run / f"global_step_{steps[-1]}" / "manifest.json").is_file()
        launcher, ranks = start()
        launcher.kill()
        wait_for(lambda: not any(map(is_running, ranks)))
        launcher, ranks = start()  # the lock of the killed rank stops nothing
        assert launcher.poll() is None
        assert len(read_metrics(run)) > len(steps)
    finally:
        launcher.kill()
        launcher.wait()
