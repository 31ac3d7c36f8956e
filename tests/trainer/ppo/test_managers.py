"""The reward managers of training and validation."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.data.create import create_run_dataset
from hone.models.load import load_tokenizer
from hone.rewards.managers.blank import BlankRewardManager
from hone.rewards.managers.prime import PrimeRewardManager
from hone.trainer.ppo.managers import load_validation_manager
from hone.verl.dialect import load_config

from ..runs import Task
from .test_resuming_another_run import any_trainer


def test_validation_rows_without_a_score_name_the_argument_that_is_missing(task: Task) -> None:
    from hone.rewards.scores.table import UnknownSourceError

    overrides = (task.validated(), "custom_reward_function.path=null")
    with pytest.raises(UnknownSourceError, match="val_reward_fn was not given with reward_fn"):
        any_trainer(task, *overrides, reward_fn=lambda *a, **k: None)


def test_prime_replaces_blank_in_validation(task: Task, tmp_path: Path) -> None:
    blank = ("reward_model.enable=true", "reward_model.reward_manager=blank")
    overrides = task.overrides(tmp_path, *blank, f"reward_model.model.path={task.model}")
    config, tokenizer = load_config(overrides), load_tokenizer(str(task.model))
    dataset = create_run_dataset(None, config.data, tokenizer, is_train=True)
    assert isinstance(load_validation_manager(config, tokenizer, dataset), PrimeRewardManager)
    assert isinstance(load_validation_manager(config, tokenizer, None), BlankRewardManager)
