"""The rows of rules.txt: patterns, values without a message, and no row that can never apply."""

from __future__ import annotations

import pytest

from hone.config import ConfigError
from hone.config.conditions import is_off, is_one_of, lines_per_sentence
from hone.config.keys import leaves
from hone.config.trees import TREES
from hone.verl.dialect import load_config
from hone.verl.rules import matches_pattern, rule_of, rules

STATES = rules("refused", "neutral")


@pytest.mark.parametrize(
    ("pattern", "key", "matches"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.**", "a.b.c", True),
        ("a.**", "a", True),
        ("a.**", "ab", False),
        ("**.x", "x", True),
        ("**.x", "a.b.x", True),
        ("**.x", "a.bx", False),
        ("**.x.**", "a.x.y.z", True),
        ("**.x.**", "a.x", True),
        ("a.b*", "a.bc", True),
        ("a.b*", "a.c", False),
    ],
)
def test_patterns_name_keys(pattern: str, key: str, matches: bool) -> None:
    assert matches_pattern(pattern, key) is matches


def test_rules_have_no_message_for_values_without_effect() -> None:
    assert is_one_of("anything", ("any",))
    assert is_one_of(1, (1,))
    assert not is_one_of(True, (1,))
    assert not is_one_of(2, (1,))
    assert is_one_of(0.5, ("number",))
    assert not is_one_of(True, ("number",))
    assert is_one_of(3, ("count",))
    assert not any(is_one_of(value, ("count",)) for value in (0, 1.0, True))
    assert all(is_off(v) for v in (None, False, 0, "disabled", {}, [], {"a": None}))
    assert not any(is_off(v) for v in (True, 1, "R2", {"a": 1}, [1]))


def test_a_key_with_a_field_has_no_row_of_its_own() -> None:
    """A field decides before the table; a row that names only fields would never be read."""
    for tree in TREES.values():
        keys = {info.key for info in leaves(tree.root).values()}
        rows = [r.pattern for r in STATES if r.tree in ("*", tree.name) and r.pattern in keys]
        assert rows == [], tree.name


def test_no_row_is_hidden_by_an_earlier_one() -> None:
    for rule in STATES:
        key = rule.pattern.replace("**", "x").replace("*", "x")
        tree = "ppo_trainer" if rule.tree == "*" else rule.tree
        assert rule_of(key, tree) in (rule, rule_of(key.replace("x.", "y.", 1), tree)), rule


def test_no_row_advises_the_value_that_was_written() -> None:
    for rule in STATES:
        assert rule.why, rule.pattern
        assert not rule.why.endswith(("use 1", "use true", "use false")), rule.pattern
    assert all(value.values for value in rules("replaced_values"))


def test_notes_with_the_same_sentence_share_a_line() -> None:
    answers = [(f"k{i}=1", "why") for i in range(5)] + [("other=2", "because")]
    assert lines_per_sentence(answers) == ["k0=1, k1=1, k2=1 and 2 more: why", "other=2: because"]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("actor_rollout_ref.model.mtp.enable_train=true", "multi-token prediction"),
        ("actor_rollout_ref.actor.qat.enable=true", "not quantised in training"),
        ("trainer.v1.trainer_mode=separate_async", "synchronous"),
        ("distillation.enabled=true", "not supported"),
        ("reward_model.training=true", "not trained"),
        ("actor_rollout_ref.actor.optim.weight_decay_incr_style=linear", "stays constant"),
    ],
)
def test_a_value_that_would_train_something_else_is_refused(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([override])
    assert f"{override} is refused: " in str(caught.value)
    assert sentence in str(caught.value)
