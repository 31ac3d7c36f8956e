"""Keyword arguments become settings of a tree, with the errors of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hone.api.settings import CallSettings, resolve_key
from hone.config import ConfigError


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("lr", "actor_rollout_ref.actor.optim.lr"),
        ("n", "actor_rollout_ref.rollout.n"),
        ("temperature", "actor_rollout_ref.rollout.temperature"),
        ("adv_estimator", "algorithm.adv_estimator"),
        ("steps", "trainer.total_training_steps"),
        ("max_tokens", "data.max_response_length"),
        ("total_training_steps", "trainer.total_training_steps"),
        ("n_gpus_per_node", "trainer.n_gpus_per_node"),
        ("seed", "trainer.seed"),
        ("val_kwargs.n", "actor_rollout_ref.rollout.val_kwargs.n"),
        ("critic.optim.lr", "critic.optim.lr"),
    ],
)
def test_a_name_stands_for_the_policys_key(name: str, key: str) -> None:
    assert resolve_key("ppo_trainer", name) == key


def test_a_name_that_may_mean_several_keys_is_refused_with_all_of_them() -> None:
    with pytest.raises(ConfigError, match=r"path may mean .*actor_rollout_ref\.model\.path"):
        resolve_key("ppo_trainer", "path")


def composed(**settings: object) -> object:
    return CallSettings("ppo_trainer", "hone.train", settings).compose().config  # type: ignore[arg-type]


def test_values_are_taken_as_they_are_without_a_command_lines_grammar() -> None:
    config = composed(
        train_files=[Path("a b,c.parquet")], lr=np.float64(3e-6), algorithm={"gamma": 0.5}
    )
    assert config.data.train_files == ("a b,c.parquet",)  # type: ignore[attr-defined]
    assert config.actor_rollout_ref.actor.optim.lr == 3e-6  # type: ignore[attr-defined]
    assert config.algorithm.gamma == 0.5  # type: ignore[attr-defined]


def test_a_wrong_key_or_value_has_the_command_lines_error_and_names_the_call() -> None:
    with pytest.raises(ConfigError, match=r"no setting 'lrr'. Did you mean 'lr'"):
        composed(lrr=1)
    with pytest.raises(ConfigError, match=r"algorithm has no key 'gama'.*gamma.*hone\.train"):
        composed(algorithm={"gama": 1})
    with pytest.raises(ConfigError, match="train_batch_size"):
        composed(train_batch_size=-4)
    with pytest.raises(ConfigError, match=r"total_training_steps.*hone\.train"):
        composed(steps="many")


def test_keywords_win_over_a_yaml_file_and_starting_values_stay_out(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("actor_rollout_ref:\n  rollout:\n    n: 3\n    temperature: 0.5\n")
    call = CallSettings("ppo_trainer", "hone.train", {"n": 5}, file)
    made = call.compose(starting_settings=lambda given: pytest.fail("a YAML is taken as it is"))
    rollout = made.config.actor_rollout_ref.rollout
    assert (rollout.n, rollout.temperature) == (5, 0.5)


@pytest.mark.parametrize("name", ["mine.yml", "ppo_trainer.yml", "lr-0.5.yaml", "lr-0.5"])
def test_a_config_file_of_any_name_is_read(tmp_path: Path, name: str) -> None:
    suffix = "" if name.endswith("ml") else ".yaml"
    (tmp_path / f"{name}{suffix}").write_text("trainer:\n  seed: 77\n")
    call = CallSettings("ppo_trainer", "hone.train", {}, tmp_path / name)
    assert call.compose().config.trainer.seed == 77


def test_a_missing_config_file_is_not_the_built_in_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ppo_trainer.yml' does not exist"):
        CallSettings("ppo_trainer", "hone.train", {}, tmp_path / "ppo_trainer.yml")
    (tmp_path / "mine.yml").write_text("defaults: [ppo_trainer, _self_]\n")
    with pytest.raises(ConfigError, match="rename it"):
        CallSettings("ppo_trainer", "hone.train", {}, tmp_path / "mine.yml")


@pytest.mark.parametrize(
    "names", [np.array(["console", "file"]), {"console": 0, "file": 1}.keys(), ("console", "file")]
)
def test_any_collection_of_values_is_a_list(names: Any) -> None:
    call = CallSettings("ppo_trainer", "hone.train", {"trainer.logger": names})
    assert call.values()["trainer.logger"] == ["console", "file"]
    steps = CallSettings("ppo_trainer", "hone.train", {"trainer.logger": range(2)})
    assert steps.values()["trainer.logger"] == [0, 1]
