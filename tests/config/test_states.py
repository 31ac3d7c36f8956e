"""States of keys: patterns, values let through, and that no rule is dead or shadowed by accident."""

from __future__ import annotations

import pytest

from hone.config import ConfigError, load_config
from hone.config.absent import ABSENT_RULES, absent_rule
from hone.config.describe import describe_keys
from hone.config.states import (
    Accepts,
    Rule,
    first_match,
    neutral,
    only,
    refused,
    rule_of,
    works_only,
)
from hone.config.trees import TREES

PPO = TREES["ppo_trainer"]


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
    assert (first_match(key, (neutral(pattern, "why"),)) is not None) is matches


def test_rules_let_their_values_through() -> None:
    assert neutral("a", "").lets_through("anything", None)
    assert only("a", (1,), "").lets_through(1, 0)
    assert not only("a", (1,), "").lets_through(2, 2)
    assert refused("a", "").lets_through(5, 5)
    assert not refused("a", "").lets_through(6, 5)
    assert works_only("a", ("x",), "").lets_through("x", None)
    off = Rule("a", "refused", "", Accepts.OFF)
    assert all(off.lets_through(v, None) for v in (None, False, 0, "disabled", {}, []))
    assert not any(off.lets_through(v, None) for v in (True, 1, "R2", {"a": 1}, [1]))


@pytest.mark.parametrize("name", sorted(TREES))
def test_every_rule_with_a_full_name_names_a_key(name: str) -> None:
    keys = [info.key for info in describe_keys(TREES[name])]
    for rule in TREES[name].rules:
        if not rule.pattern.startswith("**") and name in ("ppo_trainer", "evaluation"):
            assert any(first_match(key, (rule,)) for key in keys), rule.pattern


def test_every_rule_of_the_main_tree_decides_about_some_key() -> None:
    deciding = {rule_of(info.key, PPO.rules).pattern for info in describe_keys(PPO)}
    assert [r.pattern for r in PPO.rules if r.pattern not in deciding] == []


def test_absent_rules_name_no_declared_key() -> None:
    for tree in TREES.values():
        for info in describe_keys(tree):
            assert absent_rule(info.key) is None or info.key.startswith("transfer_queue"), info.key


def test_sentences_are_there() -> None:
    assert all(rule.why for rule in (*PPO.rules, *ABSENT_RULES))


@pytest.mark.parametrize("name", sorted(TREES))
def test_every_refused_or_limited_key_refuses_another_value(name: str) -> None:
    """A rule that lets every value through is not `refused`; one that limits must limit."""
    for info in describe_keys(TREES[name]):
        if info.state == "refused":
            assert info.rule.accepts is Accepts.DEFAULT
            assert not info.rule.lets_through("surely another value", info.default), info.key


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("actor_rollout_ref.actor.strategy=megatron", "FSDP2 is the one way to shard; use fsdp2"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "use 1"),
        ("actor_rollout_ref.model.mtp.enable=true", "multi-token prediction"),
        ("actor_rollout_ref.actor.router_replay.mode=R2", "not replayed"),
        ("actor_rollout_ref.rollout.quantization=fp8", "compute dtype"),
        ("global_profiler.steps=[1,2]", "timing_s/"),
        ("trainer.v1.trainer_mode=separate_async", "synchronous"),
        ("distillation.enabled=true", "not built"),
        ("ray_kwargs.ray_init.local_mode=true", "trainer.controller=local"),
        ("reward_model.training=true", "not trained"),
    ],
)
def test_a_refused_value_is_answered_with_its_sentence(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([override])
    assert f"{override.replace('[1,2]', '[1,2]')} is refused: " in str(caught.value)
    assert sentence in str(caught.value)
