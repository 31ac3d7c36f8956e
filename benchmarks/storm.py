"""`make storm`: runs that are killed hundreds of times leave what runs that were not leave.

Each seed trains once in calm, and under fire until enough kills are done: a run that comes to its end is
compared line by line and rollout by rollout, and the next one begins. Every resume starts where the last
kill left it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from hone.tracking import read_metrics
from tests.trainer.nursery import Nursery
from tests.trainer.runs import Run, Task, make_task, start

RESULTS = Path(__file__).parent / "results" / "storm.json"
MARK = "HONE_STORM"
STEPS, SAVE_EVERY = 24, 3
SHAPES = (
    ("grpo", ()),
    ("ppo", ("algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true")),
    ("pool", ("reward_model.reward_manager=prime", "reward_model.reward_kwargs.num_processes=1")),
    ("lora", ("actor_rollout_ref.model.lora_rank=4",)),
    ("epochs", ("actor_rollout_ref.actor.ppo_epochs=2", "actor_rollout_ref.actor.shuffle=true")),
)
ENDS_WITH = {
    "SIGKILL": {-9},
    "SIGKILL while saving": {-9},
    "SIGKILL just after a save": {-9},
    "SIGKILL while starting": {-9},
    "SIGTERM": {143},
    "SIGTERM to all processes": {143},
    "SIGTERM twice": {143, -15},
    "Ctrl-C": {130},
    "Ctrl-C twice": {130, -2},
    "children, then SIGKILL": {-9},
    "second start, then SIGKILL": {-9},
}
"""The kinds of kill, and the exit codes that each may leave."""


_one_second_start = threading.Lock()


class Storm:
    """One seed: the run in calm, the run under fire, and what was done to it."""

    def __init__(self, task: Task, folder: Path, seed: int) -> None:
        name, shape = SHAPES[seed % len(SHAPES)]
        self.name, self.seed = name, seed
        self.chooser = random.Random(seed)
        self.calm, self.fire = Run(folder / f"{seed}-calm"), Run(folder / f"{seed}-fire")
        common = (
            f"trainer.total_training_steps={STEPS}",
            f"trainer.save_freq={SAVE_EVERY}",
            "trainer.max_actor_ckpt_to_keep=2",
            "data.train_batch_size=1",
            task.validated(),
            "trainer.test_freq=6",
            f"trainer.seed={seed}",
            *shape,
        )
        self.calm_command = task.overrides(self.calm.folder, *common)
        self.command = task.overrides(self.fire.folder, *common)
        self.kills: Counter[str] = Counter()
        self.problems: list[str] = []
        self.runs = self.lines = self.files = 0

    def kill(self, nursery: Nursery, second: Nursery) -> None:
        """Start the run and end it in one way; a run that came to its end is compared."""
        kind = self._next_kind()
        moment = self._moment(kind)
        pid = nursery.start(self.command)
        while not nursery.has_ended():
            if moment():
                break
            time.sleep(0.0 if "save" in kind else 0.02)  # reading the metrics is no rest
        if nursery.has_ended():
            code = nursery.exit_code()
            if code != 0:
                self.problems.append(f"{kind}: the run ended by itself with code {code}")
            self.compare()
            return
        self._strike(kind, pid, second)
        code = nursery.exit_code()
        if code == 0:  # it had done its last step
            self.compare()
        elif code in ENDS_WITH[kind]:
            self.kills[kind] += 1
        else:
            self.problems.append(f"{kind}: exit code {code}")

    def _next_kind(self) -> str:
        """The kinds in turn, those done least often first."""
        least = min(self.kills[kind] for kind in ENDS_WITH)
        return self.chooser.choice([kind for kind in ENDS_WITH if self.kills[kind] == least])

    def _moment(self, kind: str) -> Callable[[], bool]:
        folder, saves = self.fire.folder, len(self.fire.checkpoints())
        if kind == "SIGKILL while starting":
            born = time.monotonic() + self.chooser.uniform(0.05, 1.5)
            return lambda: time.monotonic() > born
        if kind == "SIGKILL while saving":
            return lambda: any(folder.glob(".global_step_*.tmp/actor"))
        if kind == "SIGKILL just after a save":
            newest = _newest(folder)
            return lambda: _newest(folder) > newest or len(self.fire.checkpoints()) > saves + 1
        reached = last_step(folder) + self.chooser.choice((1, 1, 2))
        return lambda: last_step(folder) >= reached

    def _strike(self, kind: str, pid: int, second: Nursery) -> None:
        time.sleep(self.chooser.uniform(0, 0.05) if "save" not in kind else 0.0)
        if kind == "second start, then SIGKILL":
            before = _names(self.fire.folder)
            with _one_second_start:
                code = second.run(self.command)
            # Where the first run has ended meanwhile, the second may take the folder.
            if code != 2 and Path(f"/proc/{pid}/exe").exists():
                self.problems.append(f"a second start ended with code {code}")
            if missing := before - _names(self.fire.folder, also_finished=True):
                self.problems.append(f"a second start removed {sorted(missing)}")
        if kind == "children, then SIGKILL":
            for child in children(pid):
                _send(child, signal.SIGKILL)
            time.sleep(self.chooser.uniform(0, 0.5))
        number = signal.SIGKILL
        if "SIGTERM" in kind:
            number = signal.SIGTERM
        elif "Ctrl-C" in kind:
            number = signal.SIGINT
        for target in [pid, *(children(pid) if "all processes" in kind else ())]:
            _send(target, number)
        if "twice" in kind:
            time.sleep(0.02)
            _send(pid, number)

    def finish(self) -> dict[str, Any]:
        """Run to the end once more, as a user would, and compare."""
        last = start(self.command)
        output, _ = last.communicate(timeout=1200)
        if last.returncode != 0:
            self.problems.append(f"the last run ended with {last.returncode}: {output[-300:]}")
        self.compare()
        return {
            "shape": self.name,
            "kills": sum(self.kills.values()),
            "by_kind": dict(self.kills),
            "runs_compared": self.runs,
            "metrics_lines_equal": self.lines,
            "rollout_and_validation_files_equal": self.files,
            "problems": self.problems,
        }

    def compare(self) -> None:
        """The run under fire must be the run in calm; its folder is removed for the next one."""
        calm, fire = self.calm.numbers, self.fire.numbers
        equal = sum(a == b for a, b in zip(calm, fire, strict=False))
        if calm != fire:
            self.problems.append(f"metrics: {equal} of {len(calm)} lines equal, {len(fire)} there")
        for part in ("rollouts", "validation"):
            self._compare_files(part)
        left = [p.name for p in self.fire.folder.iterdir() if p.name.startswith(".")]
        left += [p.name for p in self.fire.folder.glob("*.earlier")]
        if left:
            self.problems.append(f"left behind: {left}")
        self.runs += 1
        self.lines += equal
        shutil.rmtree(self.fire.folder)

    def _compare_files(self, part: str) -> None:
        folders = [run.folder / part for run in (self.calm, self.fire)]
        calm, fire = (sorted(p.name for p in folder.iterdir()) for folder in folders)
        if calm != fire:
            self.problems.append(f"{part}: {len(calm)} files in calm, {len(fire)} under fire")
        for name in set(calm) & set(fire):
            tables = [pq.read_table(folder / name) for folder in folders]
            if tables[0].equals(tables[1]):
                self.files += 1
            else:
                self.problems.append(f"{part}/{name} differs")


def last_step(folder: Path) -> int:
    if not (folder / "metrics.jsonl").exists():
        return 0
    return max((line["step"] for line in read_metrics(folder)), default=0)


def children(pid: int) -> list[int]:
    """The processes below a process, at any depth."""
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [n for child in map(int, listed) for n in (child, *children(child))]


def _newest(folder: Path) -> int:
    steps = [p.name.removeprefix("global_step_") for p in folder.glob("global_step_*")]
    return max((int(step) for step in steps if step.isdigit()), default=0)


def _names(folder: Path, *, also_finished: bool = False) -> set[str]:
    """What may not vanish while a second process starts: rollouts, and the checkpoint being written."""
    names = {f"rollouts/{p.name}" for p in (folder / "rollouts").glob("step_*.parquet")}
    for part in folder.glob(".global_step_*.tmp"):
        names.add(part.name)
    if also_finished:  # it may have been renamed meanwhile
        names |= {f".{p.name}.tmp" for p in folder.glob("global_step_*")}
    return names


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def marked_processes(mark: str) -> Iterator[int]:
    """Processes of this storm, by their environment; not this one."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    yield int(entry.name)
            except OSError:
                continue


def shared_memory(before: set[str]) -> list[str]:
    """New names in /dev/shm that no other program's prefix explains."""
    foreign = ("plasma", "ray", "sem.", "cuda", "nccl", "vllm", "psm_")
    new = set(os.listdir("/dev/shm")) - before
    return sorted(name for name in new if not name.startswith(foreign))


def rage(storm: Storm, kills: int, second: Nursery, ends: float) -> dict[str, Any]:
    """One seed: the run in calm, then kills until there are enough or the time is up."""
    with Nursery() as nursery:
        if nursery.run(storm.calm_command) != 0:
            storm.problems.append("the run in calm failed")
        for _ in range(6 * kills):
            if sum(storm.kills.values()) >= kills or time.time() > ends:
                break
            storm.kill(nursery, second)
    result = {"seed": storm.seed, **storm.finish()}
    print(json.dumps(result), flush=True)
    return result


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storm")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=len(SHAPES))
    parser.add_argument("--minutes", type=float, default=180.0, help="no kill after so long")
    parser.add_argument("--jobs", type=int, default=1, help="seeds at once")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    mark, memory = uuid.uuid4().hex, set(os.listdir("/dev/shm"))
    os.environ[MARK] = mark
    began = time.time()
    ends = began + 60 * chosen.minutes
    with tempfile.TemporaryDirectory(prefix="hone-storm-") as scratch:
        task, kills = make_task(Path(scratch)), -(-chosen.kills // chosen.seeds)
        with ThreadPoolExecutor(chosen.jobs) as pool, Nursery() as second:
            seeds = range(1, chosen.seeds + 1)
            storms = [Storm(task, Path(scratch), seed) for seed in seeds]
            results = list(pool.map(lambda storm: rage(storm, kills, second, ends), storms))
        processes = list(marked_processes(mark))
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "minutes": round((time.time() - began) / 60, 1),
        "machine": {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0))},
        "versions": {name: version(name) for name in ("torch", "transformers", "pyarrow", "numpy")},
        "steps_per_run": STEPS,
        "kills": sum(result["kills"] for result in results),
        "by_kind": dict(sum((Counter(result["by_kind"]) for result in results), Counter())),
        "runs": results,
        "processes_left": len(processes),
        "shared_memory_left": shared_memory(memory),
    }
    chosen.out.write_text(json.dumps(report, indent=1) + "\n")
    sound = not any(result["problems"] for result in results) and not processes
    print(f"{report['kills']} kills: {'every run is the run in calm' if sound else 'see problems'}")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
