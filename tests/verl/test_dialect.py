"""The seam of the room: `compose` knows verl's keys from the dialect that a program gives it."""

from __future__ import annotations

import pytest

from hone.config import ConfigError, compose
from hone.verl.dialect import VERL_KEYS


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("data.max_obs_length=3", "data has no key 'max_obs_length'"),
        ("trainer.use_v1=true", "trainer has no key 'use_v1'"),
        ("actor_rollout_ref.rollout.skip_rollout=true", "has no key 'skip_rollout'"),
        ("hone.tree=pure", "the config has no key 'hone'"),
    ],
)
def test_without_a_dialect_only_hones_own_keys_are_known(override: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        compose([override])
    assert compose(["data.max_prompt_length=7"]).config.data.max_prompt_length == 7


def test_without_a_dialect_only_hones_own_configs_are_known() -> None:
    assert compose(config_name="sft_trainer").config.data.max_length
    with pytest.raises(ConfigError, match="there is no config 'dapo_trainer'"):
        compose(config_name="dapo_trainer")
    compose(config_name="dapo_trainer", dialect=VERL_KEYS)
