"""`python -m benchmarks.storm_nodes`: the kill storm on three raylets, for two ranks on different nodes.

Workers, raylets and the driver are killed in random order. After a worker or a raylet the run must restart
by itself, on the nodes that are left; after the driver the same command is started again. Nodes come back
at random. Every prompt must be used as often as in the run in calm, with the same responses; metrics must be
equal up to the rounding of another number of ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.storm import last_step
from benchmarks.storm_ray import below, write_report
from tests.controller.raylets import Raylets
from tests.trainer.nursery import Nursery
from tests.trainer.runs import Run, Task, make_task

RESULTS = Path(__file__).parent / "results" / "storm_nodes.json"
RAYLETS, RANKS, STEPS, PROMPTS, SAMPLES = 3, 2, 24, 4, 2
WORKER = "ray::_WorkerActor"
KINDS = {"worker": 10, "raylet": 12, "driver": 8}
"""The kinds of kill, and how often of 30."""
STUCK_S, END_DEADLINE_S = 400.0, 60.0
TOLERANCE = 1e-3
DEPENDS_ON_RANKS = ("global_seqlen/", "perf/")


class NodeStorm:
    """One run in calm, one under fire."""

    def __init__(self, task: Task, folder: Path, raylets: Raylets, seed: int, steps: int) -> None:
        self.steps, self.raylets, self.chooser = steps, raylets, random.Random(seed)
        self.calm, self.fire = Run(folder / "calm"), Run(folder / "fire")
        shape = (
            "trainer.controller=ray",
            f"trainer.nnodes={RANKS}",
            f"ray_kwargs.ray_init.address={raylets.address}",
            "trainer.max_restarts=1000",
            f"trainer.total_training_steps={steps}",
            "trainer.save_freq=2",
            "trainer.max_actor_ckpt_to_keep=2",
            f"data.train_batch_size={PROMPTS}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
            f"actor_rollout_ref.rollout.n={SAMPLES}",
            "actor_rollout_ref.actor.use_kl_loss=true",
            # Adam makes a full step of rounding noise where a gradient is almost zero.
            "actor_rollout_ref.actor.optim.optimizer=SGD",
            "actor_rollout_ref.actor.optim.lr=0.5",
        )
        self.calm_command = task.overrides(self.calm.folder, *shape)
        self.command = task.overrides(self.fire.folder, *shape)
        self.kills: Counter[str] = Counter()
        self.steps_by_ranks: Counter[str] = Counter()
        self.problems: list[str] = []
        self.runs = self.nodes_back = 0
        self.difference = 0.0

    def rage(self, nursery: Nursery, kinds: list[str], ends: float) -> None:
        """Kill in each of these ways in turn; a run that has come to its end is compared, and begins anew."""
        pid = nursery.start(self.command)
        for number, kind in enumerate(kinds):
            while not self.problems and not self._moment(nursery):
                self._end(nursery.exit_code())
                if not self.problems:
                    pid = nursery.start(self.command)
            if self.problems or time.monotonic() > ends:
                break
            if self._strike(kind, pid):
                self.kills[kind] += 1
            if kind == "driver":
                if (code := nursery.exit_code()) != -signal.SIGKILL:
                    self.problems.append(f"driver: exit code {code}")
                self._expect_no(self._workers(), "workers of a dead driver")
                self._bring_back(all_of_them=True)
                pid = nursery.start(self.command)
            self._bring_back(all_of_them=False)
            sys.stderr.write(f"STORM {number + 1} of {len(kinds)}: {kind} {self.problems}\n")
        if self.problems:
            os.kill(pid, signal.SIGKILL)
        else:
            self._end(nursery.exit_code())

    def _moment(self, nursery: Nursery) -> bool:
        """Wait for a step, or for some seconds of a start; False if the run has ended."""
        gives_up, before = time.monotonic() + STUCK_S, last_step(self.fire.folder)
        early = self.chooser.random() < 0.3
        born = time.monotonic() + self.chooser.uniform(0.5, 15.0)
        while not nursery.has_ended():
            now = last_step(self.fire.folder)
            if now > before or (early and time.monotonic() > born):
                time.sleep(self.chooser.uniform(0.0, 1.0))
                return not nursery.has_ended()
            before = now  # a restart cuts the metrics back to the checkpoint
            if time.monotonic() > gives_up:
                self.problems.append(f"no step within {STUCK_S:g} s")
                return True
            time.sleep(0.1)
        return False

    def _strike(self, kind: str, pid: int) -> bool:
        gives_up = time.monotonic() + STUCK_S
        if kind == "driver":
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return True
        if kind == "worker":
            while not (targets := self._workers()) and time.monotonic() < gives_up:
                time.sleep(0.2)  # between two attempts there is none
            if targets:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.chooser.choice(targets), signal.SIGKILL)
            return bool(targets)
        others = sorted(self.raylets.nodes.keys() - {self.raylets.head})
        if not others:
            self._bring_back(all_of_them=True)
            others = sorted(self.raylets.nodes.keys() - {self.raylets.head})
        node = self.chooser.choice(others)
        workers = below(self.raylets.nodes[node], WORKER)
        self.raylets.kill(node)
        self._expect_no(workers, "workers of a dead raylet")
        return True

    def _bring_back(self, all_of_them: bool) -> None:
        for _ in range(RAYLETS - len(self.raylets.nodes)):
            if all_of_them or self.chooser.random() < 0.35:
                self.raylets.add(1)
                self.nodes_back += 1

    def _workers(self) -> list[int]:
        return [
            worker for raylet in self.raylets.nodes.values() for worker in below(raylet, WORKER)
        ]

    def _expect_no(self, pids: list[int], what: str) -> None:
        ends = time.monotonic() + END_DEADLINE_S
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            if time.monotonic() > ends:
                self.problems.append(f"{what} are left after {END_DEADLINE_S:g} s")
                return
            time.sleep(0.2)

    def _end(self, code: int) -> None:
        if code != 0:
            self.problems.append(f"the run ended with code {code}")
            return
        self._expect_no(self._workers(), "workers of a run that has ended")
        self.compare()
        shutil.rmtree(self.fire.folder)

    def compare(self) -> None:
        """A run under fire that came to its end against the run in calm: every line, every response."""
        calm, fire = self.calm.numbers, self.fire.numbers
        self.runs += 1
        if [line["step"] for line in fire] != [*range(1, self.steps + 1)]:
            self.problems.append(f"metrics: {len(fire)} of {len(calm)} lines")
            return
        for step, (one, other) in enumerate(zip(calm, fire, strict=True), 1):
            self._compare_lines(step, one, other)
            if self._responses(self.calm, step) != self._responses(self.fire, step):
                self.problems.append(f"the responses of step {step} differ")
        used = [
            Counter(row["uid"] for step in range(1, self.steps + 1) for row in run.rollouts(step))
            for run in (self.calm, self.fire)
        ]
        if used[0] != used[1] or len(set(used[0].values())) != 1:
            self.problems.append("a prompt was lost or used twice")

    def _compare_lines(self, step: int, one: dict[str, Any], other: dict[str, Any]) -> None:
        mean = "global_seqlen/mean"
        ranks = round(RANKS * one[mean] / other[mean]) if mean in other else 1
        self.steps_by_ranks[str(ranks)] += 1
        for name in one:
            if name.startswith(DEPENDS_ON_RANKS) or one[name] == other.get(name):
                continue
            if not isinstance(one[name], float) or not isinstance(other.get(name), float):
                self.problems.append(
                    f"step {step}: {name} is {other.get(name)}, {one[name]} in calm"
                )
                continue
            apart = abs(one[name] - other[name]) / max(abs(one[name]), TOLERANCE)
            self.difference = max(self.difference, apart)
            if apart > TOLERANCE:
                self.problems.append(f"step {step}: {name} is {other[name]}, {one[name]} in calm")

    def _responses(self, run: Run, step: int) -> dict[str, Any]:
        return {row["trajectory_id"]: row["response_ids"] for row in run.rollouts(step)}

    def finding(self) -> dict[str, Any]:
        return {
            "kills": sum(self.kills.values()),
            "by_kind": dict(self.kills),
            "nodes_that_came_back": self.nodes_back,
            "runs_to_the_end": self.runs,
            "steps_by_ranks": dict(sorted(self.steps_by_ranks.items())),
            "largest_relative_difference": self.difference,
            "problems": self.problems,
        }


def run_storm(
    folder: Path, kinds: list[str], seed: int = 7, steps: int = STEPS, minutes: float = 120.0
) -> dict[str, Any]:
    """A run in calm, then one killed in each of these ways while there is time; the finding."""
    ends = time.monotonic() + 60 * minutes
    raylets = Raylets([1] * RAYLETS)
    os.environ.update(raylets.environment)
    with raylets, Nursery() as nursery:
        storm = NodeStorm(make_task(folder), folder, raylets, seed, steps)
        if code := nursery.run(storm.calm_command):
            storm.problems.append(f"the run in calm ended with code {code}")
        else:
            storm.rage(nursery, kinds, ends)
        return storm.finding()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storm_nodes")
    parser.add_argument("--kills", type=int, default=sum(KINDS.values()))
    parser.add_argument("--minutes", type=float, default=120.0, help="begin no kill after these")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    kinds = random.Random(chosen.seed).sample(list(KINDS), counts=KINDS.values(), k=chosen.kills)
    memory, began = set(os.listdir("/dev/shm")), time.time()
    with tempfile.TemporaryDirectory(prefix="node-storm-") as scratch:
        result = run_storm(Path(scratch), kinds, chosen.seed, chosen.steps, chosen.minutes)
    facts = {"raylets": RAYLETS, "ranks": RANKS, "steps_per_run": chosen.steps, "seed": chosen.seed}
    write_report(chosen.out, began, memory, {**facts, **result})
    sys.stdout.write(
        f"{result['kills']} kills: {result['problems'] or 'the run is the run in calm'}\n"
    )
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
