"""Golden runs: what the loop computed at one commit, compared bit for bit with what it computes at another.

    python -m benchmarks.golden record FOLDER [NAME …]     at the earlier commit
    python -m benchmarks.golden compare FOLDER [NAME …]    at the later one, on the same machine

Every metric that no clock measured and every column of the rollout files must be equal. Metrics and
columns that the later commit adds are counted, not compared.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hone.tracking import read_metrics
from tests.trainer.nursery import Nursery
from tests.trainer.runs import Run, Task, make_task

RESULTS = Path(__file__).parent / "results" / "golden.json"
STEPS = 4
LOOP = Path(__file__).parents[1] / "examples" / "two_turn_loop.py"
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "ppo": (
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ),
    "remax": ("algorithm.adv_estimator=remax", "actor_rollout_ref.actor.use_kl_loss=true"),
    "dapo": (
        "algorithm.filter_groups.enable=true",
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
        "actor_rollout_ref.rollout.n=3",
        "data.train_batch_size=3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=3",
    ),
    "lora": (
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ),
    "two_turns": (f"actor_rollout_ref.rollout.agent.default_agent_loop={LOOP}:TwoTurnAgentLoop",),
    "correction": (
        "algorithm.rollout_correction.rollout_is=token",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.shuffle=true",
    ),
}
ON_RAY = ("trainer.controller=ray", "ray_kwargs.ray_init.num_cpus=2")
TWO_RANKS = (*ON_RAY, "trainer.n_gpus_per_node=2")
WHERE: dict[str, tuple[str, ...]] = {"local": (), "ray": ON_RAY, "ray2": TWO_RANKS}
FOUR_PROMPTS = ("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
CASES = [
    *(f"local-{name}" for name in ALGORITHMS),
    "local-grpo-killed",
    "local-ppo-killed",
    "ray-grpo",
    "ray-ppo",
    "ray2-grpo",
    "ray2-ppo",
    "ray2-dapo",
    "ray2-lora",
    "ray2-two_turns",
    "ray2-ppo-killed",
]


def play(case: str, task: Task, folder: Path, nursery: Nursery) -> Run:
    """One run to its end; a killed one is killed after its second step and started again."""
    where, name, *killed = case.split("-")
    run = Run(folder)
    command = task.overrides(
        folder,
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
        "trainer.val_before_train=true",
        task.validated(),
        *ALGORITHMS[name],
        *WHERE[where],
        *(FOUR_PROMPTS if case == "ray2-dapo" else ()),
    )
    if killed:
        nursery.run_and_kill(command, lambda: _steps_done(folder) >= 2, delay_s=0.05)
    if code := nursery.run(command):
        raise SystemExit(f"{case} ended with code {code}")
    return run


def _steps_done(folder: Path) -> int:
    if not (folder / "metrics.jsonl").exists():
        return 0
    return max(
        (int(line.get("training/global_step", 0)) for line in read_metrics(folder)), default=0
    )


def differences(golden: Run, now: Run) -> tuple[list[str], list[str], int]:
    """What is not equal; the names that are new; how many values were compared."""
    problems: list[str] = []
    new: set[str] = set()
    compared = 0
    if len(golden.numbers) != len(now.numbers):
        problems.append(f"{len(golden.numbers)} lines became {len(now.numbers)}")
    for line, (before, after) in enumerate(zip(golden.numbers, now.numbers, strict=False)):
        wrong, added = _unequal(before, after)
        problems += [f"line {line}: {text}" for text in wrong]
        new |= added
        compared += len(before)
    for step in range(1, STEPS + 1):
        pairs = zip(golden.rollouts(step), now.rollouts(step), strict=True)
        for row, (before, after) in enumerate(pairs):
            wrong, added = _unequal(before, after)
            problems += [f"rollouts of step {step}, row {row}: {text}" for text in wrong]
            new |= {f"rollouts/{name}" for name in added}
            compared += len(before)
    return problems, sorted(new), compared


def _unequal(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[list[str], set[str]]:
    wrong = [
        f"{name}: {before[name]!r} became {after.get(name)!r}"
        for name in before
        if name not in after or repr(before[name]) != repr(after[name])
    ]
    return wrong, set(after) - set(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="cases, or the beginning of their names")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    chosen = [c for c in CASES if not options.names or c.startswith(tuple(options.names))]
    options.folder.mkdir(parents=True, exist_ok=True)
    task = make_task(options.folder)
    report: dict[str, Any] = {}
    with Nursery() as nursery, tempfile.TemporaryDirectory() as temporary:
        for case in chosen:
            target = options.folder / case
            if options.what == "record":
                shutil.rmtree(target, ignore_errors=True)
                play(case, task, target, nursery)
                continue
            now = play(case, task, Path(temporary) / case, nursery)
            problems, new, compared = differences(Run(target), now)
            report[case] = {"values_compared": compared, "different": len(problems), "new": new}
            sys.stdout.write(f"{case}: {compared} values, {len(problems)} differ\n")
            sys.stdout.writelines(f"  {text[:300]}\n" for text in problems[:10])
    if options.write:
        facts = {"torch": torch.__version__, "machine": platform.machine()}
        RESULTS.write_text(json.dumps({**facts, "cases": report}, indent=1) + "\n")
    if any(case["different"] for case in report.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
