"""The base class of the workers with a training engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.tracking.manifest import FolderNotShared
from hone.verl.dialect import load_config
from hone.workers.train_worker import TrainWorker, full_config
from tests.workers.tasks import config_of


def test_a_part_of_the_config_is_completed_with_defaults():
    part = config_of(Path("folder")).actor_rollout_ref
    assert full_config(part).actor_rollout_ref is part
    assert full_config(part).trainer == load_config().trainer


def test_another_block_is_refused_by_name():
    with pytest.raises(TypeError, match="not a TrainerConfig"):
        full_config(load_config().trainer)


def test_a_rank_that_does_not_see_the_folder_of_the_checkpoint_writes_nothing(tmp_path: Path):
    worker = TrainWorker(config_of(tmp_path))
    folder = tmp_path / "run" / ".global_step_1.tmp" / "actor"  # of another machine's disk
    with pytest.raises(
        FolderNotShared, match=r"rank 0 on .* does not see .*\.global_step_1\.tmp, .*same"
    ):
        worker.save_checkpoint(str(folder))
    assert list(tmp_path.iterdir()) == []
