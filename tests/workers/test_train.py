"""The base of all training workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.config import load_config
from hone.tracking.manifest import FolderNotShared
from hone.workers.train import TrainWorker, full_config
from tests.workers.tasks import config_of


class FakeEngine:
    """Counts the steps of its schedule."""

    steps = 0

    def advance_schedule(self):
        self.steps += 1


def test_a_part_of_the_config_is_completed_with_defaults():
    part = config_of(Path("folder")).actor_rollout_ref
    assert full_config(part).actor_rollout_ref is part
    assert full_config(part).trainer == load_config().trainer


def test_another_block_is_refused_by_name():
    with pytest.raises(TypeError, match="not a TrainerConfig"):
        full_config(load_config().trainer)


def test_the_schedule_advances_once_per_step_and_optimizer_metrics_have_the_role():
    worker = TrainWorker(config_of(Path("folder")))
    worker.engine = FakeEngine()
    update = {"loss": 2.0, "grad_norm": 1.0, "lr": 0.5, "skipped_updates": 1.0}
    metrics = worker.end_updates("actor", [update, update | {"loss": 4.0, "skipped_updates": 2.0}])
    assert worker.engine.steps == 1
    assert metrics == {
        "loss": 3.0,
        "actor/grad_norm": 1.0,
        "actor/lr": 0.5,
        "actor/skipped_updates": 2.0,
    }


def test_a_rank_that_does_not_see_the_folder_of_the_checkpoint_writes_nothing(tmp_path: Path):
    worker = TrainWorker(config_of(tmp_path))
    folder = tmp_path / "run" / ".global_step_1.tmp" / "actor"  # of another machine's disk
    with pytest.raises(
        FolderNotShared, match=r"rank 0 on .* does not see .*\.global_step_1\.tmp, .*same"
    ):
        worker.save_checkpoint(str(folder))
    assert list(tmp_path.iterdir()) == []
