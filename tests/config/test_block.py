"""Blocks are read like dicts, as verl's configs are, and cannot be written."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from hone.config.algorithm import AlgorithmConfig
from hone.config.block import Block, config_value, setting
from hone.config.keys import block_type, hints
from hone.config.trees import TREES
from hone.verl.dialect import load_config

ACTOR = load_config().actor_rollout_ref.actor


def test_a_field_is_read_by_get_by_brackets_and_by_unpacking() -> None:
    assert ACTOR.get("clip_ratio_c", 9.0) == ACTOR.clip_ratio_c == 3.0
    assert ACTOR.get("no_such_key") is None
    assert ACTOR.get("no_such_key", 7) == 7
    assert ACTOR["clip_ratio"] == 0.2
    assert ACTOR.policy_loss.get("loss_mode") == "vanilla"
    assert {**ACTOR.policy_loss}["dro_beta"] is None
    assert "clip_ratio" in ACTOR
    assert "clip" not in ACTOR
    assert list(ACTOR.policy_loss) == [f.name for f in dataclasses.fields(ACTOR.policy_loss)]


def test_a_derived_value_is_read_by_name_and_is_no_item() -> None:
    assert ACTOR.get("global_batch_info") == ACTOR.global_batch_info
    assert "global_batch_info" not in list(ACTOR)


def test_an_unknown_key_in_brackets_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(KeyError, match=r"ActorConfig has no key 'clip_ratoi'.*'clip_ratio'"):
        ACTOR["clip_ratoi"]
    with pytest.raises(AttributeError):  # what verl's configs raise
        ACTOR["clip_ratoi"]
    with pytest.raises(TypeError, match="is a string, not 3"):
        ACTOR[3]  # type: ignore[index]


def test_a_class_of_the_users_can_be_a_block() -> None:
    @dataclasses.dataclass
    class Mine(Block):
        size: int = 3

    mine = Mine()
    mine.note = "x"  # type: ignore[attr-defined]
    assert (mine["size"], mine.get("note"), mine.get("none", 1), list(mine)) == (
        3,
        "x",
        1,
        ["size"],
    )
    assert list(Block()) == []


def test_nothing_can_be_written() -> None:
    with pytest.raises(TypeError):
        ACTOR["clip_ratio"] = 0.3  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        ACTOR.clip_ratio = 0.3  # type: ignore[misc]


def test_every_block_of_every_tree_can_be_read_as_a_mapping() -> None:
    waiting, seen = [tree.root for tree in TREES.values()], set()
    while waiting:
        cls = waiting.pop()
        if cls not in seen:
            seen.add(cls)
            assert issubclass(cls, Mapping), cls
            waiting += [b for b in map(block_type, hints(cls).values()) if b is not None]
    assert len(seen) > 40


def test_a_block_is_still_equal_copied_and_pickled_as_a_dataclass() -> None:
    assert copy.deepcopy(ACTOR) == ACTOR == pickle.loads(pickle.dumps(ACTOR))
    assert dataclasses.replace(ACTOR, clip_ratio=0.5) != ACTOR
    assert ACTOR != {**ACTOR}
    assert hash(ACTOR.policy_loss) == hash(copy.deepcopy(ACTOR.policy_loss))


@pytest.mark.parametrize(
    "config",
    [{"a": {"b": 3}}, SimpleNamespace(a=SimpleNamespace(b=3)), SimpleNamespace(a={"b": 3})],
)
def test_dotted_keys_of_dicts_and_objects(config):
    assert setting(config, "a.b", AlgorithmConfig) == 3
    assert config_value(config, "a.b") == 3
    assert config_value(config, "a.c") is None
    assert config_value(None, "a") is None


def test_missing_keys_have_their_defaults():
    assert setting(None, "gamma", AlgorithmConfig) == setting({}, "gamma", AlgorithmConfig) == 1.0
    assert setting({"gamma": None}, "gamma", AlgorithmConfig) is None


def test_the_error_of_an_unknown_key_names_it():
    with pytest.raises(KeyError, match="AlgorithmConfig has the key no_such_key"):
        setting({}, "no_such_key", AlgorithmConfig)
