"""`lr=1e-5` means the same on the command line, in YAML and in Python."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import hone
from hone.api.settings import resolve_key
from hone.config import ConfigError, compose
from hone.config.keys import leaves
from hone.config.short_keys import SHORT_KEYS, short_keys_of
from hone.config.trees import TREES


def origins(*overrides: str, tree: str = "ppo_trainer") -> dict[str, Any]:
    composed = compose(overrides, schema=tree, config_name=tree, dialect=hone.program_dialect())
    return composed.origins


def test_every_short_key_stands_for_keys_that_some_tree_has() -> None:
    known = {key for tree in TREES.values() for key in leaves(tree.root)}
    assert {key for short in SHORT_KEYS.values() for key in short.keys} <= known


@pytest.mark.parametrize("tree", TREES)
def test_the_command_line_and_python_resolve_a_short_key_alike(tree: str) -> None:
    for name, key in short_keys_of(TREES[tree].root).items():
        value = "1" if name not in ("reward", "estimator") else "grpo"
        assert key in origins(f"{name}={value}", tree=tree)
        assert resolve_key(tree, name) == key


def test_short_keys_set_the_values() -> None:
    words = (
        "model=M data=[a.jsonl,b.jsonl] reward=my.py:score val=null lr=2e-5 steps=7 n=3 out=here"
    )
    config = compose([*words.split(" "), "max_tokens=9", "batch_size=6"]).config
    assert config.actor_rollout_ref.model.path == "M"
    assert config.data.train_files == ("a.jsonl", "b.jsonl")
    custom = config.custom_reward_function
    assert (custom.path, custom.name) == ("my.py", "score")
    assert config.actor_rollout_ref.actor.optim.lr == 2e-5
    assert config.actor_rollout_ref.rollout.n == 3
    assert config.trainer.total_training_steps == 7
    assert (config.data.max_response_length, config.data.train_batch_size) == (9, 6)
    assert config.trainer.default_local_dir == "here"


def test_a_block_of_the_same_name_is_still_a_block(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("data:\n  max_response_length: 5\nn: 4\n")
    config = compose(config_name="mine", config_path=tmp_path).config
    assert config.data.max_response_length == 5
    assert config.actor_rollout_ref.rollout.n == 4


def test_an_error_names_the_key_and_what_was_written() -> None:
    with pytest.raises(ConfigError, match=r"optim\.lr=fast .*command line, written lr"):
        compose(["lr=fast"])
    with pytest.raises(ConfigError, match="Did you mean 'steps'"):
        compose(["stepss=3"])


@pytest.mark.parametrize(("function", "tree"), [("train", "ppo_trainer"), ("sft", "sft_trainer")])
def test_an_editor_completes_the_short_keys_of_python(function: str, tree: str) -> None:
    parameters = inspect.signature(getattr(hone, function)).parameters
    assert {*short_keys_of(TREES[tree].root)} - {"epochs"} <= {*parameters}
