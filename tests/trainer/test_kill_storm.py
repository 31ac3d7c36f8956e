"""The resume law under fire: killed twenty times and more, a run leaves what an unhurt one leaves."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hone.tracking import read_metrics

from .nursery import Nursery
from .runs import Run, Task, start

KILLS, WHILE_SAVING = 20, 4
STEPS, SAVE_EVERY = 24, 3


@pytest.mark.slow
@pytest.mark.timeout(1400)
def test_a_run_killed_twenty_times_is_the_run_that_was_not(task: Task, tmp_path: Path) -> None:
    shape = (
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={SAVE_EVERY}",
        "trainer.max_actor_ckpt_to_keep=2",
        "data.train_batch_size=1",
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.use_kl_loss=true",
        task.validated(),
        "trainer.test_freq=4",
    )
    calm, storm = Run(tmp_path / "calm"), Run(tmp_path / "storm")
    command = task.overrides(storm.folder, *shape)
    chooser = random.Random(7)
    kills: list[bool] = []  # whether a checkpoint was half written
    with Nursery() as nursery:
        assert nursery.run(task.overrides(calm.folder, *shape)) == 0
        for attempt in range(100):
            if len(kills) >= KILLS and sum(kills) >= WHILE_SAVING:
                break
            moment, delay_s = _moment(storm.folder, chooser, saving=attempt % 3 == 0)
            if nursery.run_and_kill(command, moment, delay_s):
                kills.append(any(storm.folder.glob(".global_step_*.tmp")))
            else:  # it came through unhurt: take its last checkpoint away and go on
                shutil.rmtree(storm.checkpoint(STEPS))
    last = start(command)  # and once more as a user would
    output, _ = last.communicate(timeout=600)
    assert last.returncode == 0, output
    assert len(kills) >= KILLS
    assert sum(kills) >= WHILE_SAVING
    assert storm.numbers == calm.numbers
    assert [line["step"] for line in storm.steps] == list(range(1, STEPS + 1))
    uids = [{row["uid"] for row in storm.rollouts(step)} for step in range(1, STEPS + 1)]
    assert all(len(result) == 1 for result in uids)
    assert len(set.union(*uids)) == STEPS  # 24 rows, 24 steps: each prompt exactly once
    assert storm.rollouts(STEPS) == calm.rollouts(STEPS)
    assert not list(storm.folder.glob(".*.tmp"))


def _moment(
    folder: Path, chooser: random.Random, *, saving: bool
) -> tuple[Callable[[], bool], float]:
    """When to kill: while a checkpoint is written, while it starts, or soon after some step."""
    if saving:
        return lambda: any(folder.glob(".global_step_*.tmp/actor")), chooser.uniform(0, 0.03)
    if chooser.random() < 0.25:
        born = time.monotonic() + chooser.uniform(0.1, 1.5)
        return lambda: time.monotonic() > born, 0.0
    reached = _last_step(folder) + chooser.choice((1, 1, 2, 3))
    return lambda: _last_step(folder) >= reached, chooser.uniform(0, 0.1)


def _last_step(folder: Path) -> int:
    if not (folder / "metrics.jsonl").exists():
        return 0
    return max((line["step"] for line in read_metrics(folder)), default=0)
