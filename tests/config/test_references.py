"""References between keys: ours and OmegaConf's agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.config import ConfigError
from hone.config.keys import leaves, resolve, resolve_with_omegaconf
from hone.config.trees import TREES
from hone.verl.dialect import load_config


@pytest.mark.parametrize("name", sorted(TREES))
def test_the_schemas_references_resolve_as_omegaconf_would(name: str) -> None:
    defaults = {key: leaf.default for key, leaf in leaves(TREES[name].root).items()}
    assert resolve(defaults) == resolve_with_omegaconf(defaults)


def test_a_key_follows_the_one_it_names_unless_it_is_set() -> None:
    config = load_config(["data.max_prompt_length=64", "actor_rollout_ref.rollout.n=3"])
    assert config.actor_rollout_ref.rollout.prompt_length == 64
    assert config.critic.rollout_n == 3
    config_with_both = load_config(
        ["data.max_prompt_length=64", "actor_rollout_ref.rollout.prompt_length=128"]
    )
    assert config_with_both.actor_rollout_ref.rollout.prompt_length == 128


def test_a_user_may_refer_to_keys_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_RANKS", "2")
    config = load_config(
        [
            "trainer.n_gpus_per_node=${oc.env:MY_RANKS}",
            "data.seed=${trainer.seed}",
            "trainer.default_local_dir=runs/${trainer.experiment_name}",
            "trainer.experiment_name=${oc.select:nowhere.name,plain}",
        ]
    )
    assert config.trainer.n_gpus_per_node == 2
    assert config.data.seed == 1
    assert config.trainer.default_local_dir == "runs/plain"


def test_a_reference_to_nothing_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"does not resolve: .*nowhere.*\(in data.seed\)"):
        load_config(["data.seed=${nowhere.seed}"])


def test_an_escaped_reference_is_text() -> None:
    config = load_config(["trainer.project_name=a\\${data.train_batch_size}"])
    assert config.trainer.project_name == "a${data.train_batch_size}"


def test_an_escaped_reference_of_a_key_to_itself_is_text() -> None:
    config = load_config(["trainer.project_name=a\\${trainer.project_name}"])
    assert config.trainer.project_name == "a${trainer.project_name}"


def test_a_default_may_contain_the_text_of_a_reference() -> None:
    config = load_config(
        ["trainer.experiment_name='\\${none}'", "trainer.default_local_dir=/checkpoints"]
    )
    assert config.trainer.experiment_name == "${none}"
    assert config.trainer.default_local_dir == "/checkpoints"


def test_a_circle_is_explained() -> None:
    with pytest.raises(ConfigError, match="leads back to itself"):
        load_config(["data.seed=${trainer.seed}", "trainer.seed=${data.seed}"])


def test_hydras_own_resolvers_work(tmp_path: Path) -> None:
    config = load_config(["trainer.experiment_name=run_${now:%Y}"])
    assert config.trainer.experiment_name.startswith("run_2")
