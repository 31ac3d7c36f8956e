"""`python -m benchmarks.storm_ray`: the kill storm on Ray, two ranks (gloo, FSDP2) in their own processes.

A run in calm and a run under fire: the loop, a worker or a process of Ray is killed or stopped again and
again, and the same command is started again; metrics and rollouts must be those of the run in calm.
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
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.storm import children, last_step, shared_memory
from hone.launch.reaper import MARK_ENV
from tests.trainer.nursery import Nursery
from tests.trainer.runs import Run, Task, make_task

RESULTS = Path(__file__).parent / "results" / "storm_ray.json"
STEPS = 24
END_DEADLINE_S = 60.0
KINDS = {
    "loop SIGKILL": ("loop", signal.SIGKILL, {-9}),
    "loop SIGTERM": ("loop", signal.SIGTERM, {143}),
    "worker SIGKILL": ("ray::_WorkerActor", signal.SIGKILL, {2}),
    "worker SIGSTOP": ("ray::_WorkerActor", signal.SIGSTOP, {2}),
    "raylet SIGKILL": ("raylet", signal.SIGKILL, {2}),
    "gcs_server SIGKILL": ("gcs_server", signal.SIGKILL, {2}),
    "loop SIGKILL while starting": ("loop", signal.SIGKILL, {-9}),
}
"""The kinds of kill: the process, the signal, and the exit codes that the command may end with."""


class RayStorm:
    """One run in calm, one under fire."""

    def __init__(self, task: Task, folder: Path, seed: int, steps: int = STEPS) -> None:
        self.steps = steps
        self.chooser = random.Random(seed)
        self.calm, self.fire = Run(folder / "calm"), Run(folder / "fire")
        shape = (
            "trainer.controller=ray",
            "trainer.n_gpus_per_node=2",
            "trainer.liveness_deadline_s=4",
            f"trainer.total_training_steps={steps}",
            "trainer.save_freq=2",
            "trainer.max_actor_ckpt_to_keep=2",
            "data.train_batch_size=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "ray_kwargs.ray_init.num_cpus=2",
        )
        self.calm_command = task.overrides(self.calm.folder, *shape)
        self.command = task.overrides(self.fire.folder, *shape)
        self.kills: Counter[str] = Counter()
        self.problems: list[str] = []
        self.runs = self.lines_equal = 0

    def kill(self, nursery: Nursery, kind: str) -> None:
        """Start the run and end it in one way; a run that ended before is compared, the next one begins."""
        victim, number, codes = KINDS[kind]
        born = time.monotonic() + self.chooser.uniform(0.5, 12.0)
        reached = last_step(self.fire.folder) + self.chooser.choice((0, 1, 1))
        pid = nursery.start(self.command)
        while not nursery.has_ended():
            early = kind.endswith("while starting") and time.monotonic() > born
            if early or last_step(self.fire.folder) > reached:
                break
            time.sleep(0.02)
        time.sleep(self.chooser.uniform(0.0, 0.3))
        targets = [pid] if victim == "loop" else below(pid, victim)
        target = self.chooser.choice(targets) if targets else None
        if not nursery.has_ended() and target is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, number)
        code = nursery.exit_code()
        if code in codes:
            self.kills[kind] += 1
        elif code != 0:
            self.problems.append(f"{kind}: exit code {code}")
        if code == 0:  # it had done its last step
            self.compare()
            shutil.rmtree(self.fire.folder)
        if left := _left_after_a_while():
            self.problems.append(f"{kind}: {len(left)} processes of Ray are left")

    def verdict(self, nursery: Nursery) -> dict[str, Any]:
        """Run to the end, and compare everything."""
        if code := nursery.run(self.command):
            self.problems.append(f"the last run ended with code {code}")
        self.compare()
        return {
            "kills": sum(self.kills.values()),
            "by_kind": dict(self.kills),
            "runs_to_the_end": self.runs,
            "metrics_lines_equal": self.lines_equal,
            "problems": self.problems,
        }

    def compare(self) -> None:
        """A run under fire that came to its end against the run in calm: every line, every rollout."""
        calm, fire = self.calm.numbers, self.fire.numbers
        lines = sum(a == b for a, b in zip(calm, fire, strict=False))
        if calm != fire or len(calm) != self.steps:
            self.problems.append(f"metrics: {lines} of {len(calm)} lines equal, {len(fire)} there")
        for step in range(1, self.steps + 1):
            if self.calm.rollouts(step) != self.fire.rollouts(step):
                self.problems.append(f"the rollouts of step {step} differ")
        self.runs += 1
        self.lines_equal += lines


def below(pid: int, name: str) -> list[int]:
    """The processes of this name below a process."""
    found = []
    for child in children(pid):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{child}/comm").read_text().strip() == name[:15]:
                found.append(child)
    return found


def _left_after_a_while() -> list[int]:
    """Processes of any Ray that a run of this storm started, after they had time to end."""
    ends = time.monotonic() + END_DEADLINE_S
    while (left := _ray_processes()) and time.monotonic() < ends:
        time.sleep(0.2)
    return left


def _ray_processes() -> list[int]:
    found = []
    storm = f"HONE_STORM={os.environ['HONE_STORM']}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                environ = (entry / "environ").read_bytes()
                if storm in environ and f"{MARK_ENV}=".encode() in environ:
                    found.append(int(entry.name))
    return found


def run_storm(
    folder: Path, kinds: list[str], seed: int = 7, steps: int = STEPS, minutes: float = 120.0
) -> dict[str, Any]:
    """A run in calm, then one killed in each of these ways in turn while there is time; the finding."""
    ends = time.monotonic() + 60 * minutes
    os.environ["HONE_STORM"] = f"ray-{os.getpid()}"
    storm = RayStorm(make_task(folder), folder, seed, steps)
    with Nursery() as nursery:
        if code := nursery.run(storm.calm_command):
            storm.problems.append(f"the run in calm ended with code {code}")
        for number, kind in enumerate(kinds):
            for _ in range(3):  # a run that ended before it was struck is no kill
                before = sum(storm.kills.values())
                storm.kill(nursery, kind)
                if sum(storm.kills.values()) > before or storm.problems:
                    break
            sys.stderr.write(f"{number + 1} of {len(kinds)}: {kind} {storm.problems}\n")
            if storm.problems or time.monotonic() > ends:
                break
        return storm.verdict(nursery)


def write_report(out: Path, began: float, memory: set[str], result: dict[str, Any]) -> None:
    """The finding of a storm that began then, with the machine and the versions."""
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "minutes": round((time.time() - began) / 60, 1),
        "machine": {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0))},
        "versions": {name: version(name) for name in ("torch", "transformers", "ray")},
        **result,
        "shared_memory_left": shared_memory(memory),
    }
    out.write_text(json.dumps(report, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storm_ray")
    parser.add_argument("--kills", type=int, default=21)
    parser.add_argument("--minutes", type=float, default=120.0, help="begin no kill after these")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    kinds = [list(KINDS)[number % len(KINDS)] for number in range(chosen.kills)]
    memory, began = set(os.listdir("/dev/shm")), time.time()
    with tempfile.TemporaryDirectory(prefix="ray-storm-") as scratch:
        result = run_storm(Path(scratch), kinds, minutes=chosen.minutes)
    write_report(chosen.out, began, memory, {"ranks": 2, "steps_per_run": STEPS, **result})
    print(f"{result['kills']} kills: {result['problems'] or 'the run is the run in calm'}")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
