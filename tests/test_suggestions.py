"""The known name that an error message suggests."""

from __future__ import annotations

from hone.suggestions import did_you_mean, nearest, suggestion


def test_the_most_similar_name_is_suggested() -> None:
    assert nearest("grppo", ["gae", "grpo", "rloo"]) == "grpo"
    assert suggestion("grppo", ["gae", "grpo", "rloo"]) == " Did you mean 'grpo'?"


def test_nothing_is_suggested_without_a_similar_name() -> None:
    assert nearest("seed", ["grpo"]) is None
    assert nearest("grppo", ["grpo"], min_similarity=0.95) is None
    assert suggestion("seed", ["grpo"]) == did_you_mean() == did_you_mean(None) == ""


def test_several_names_are_joined() -> None:
    assert did_you_mean("a.lr", None, "b.lr") == " Did you mean 'a.lr' or 'b.lr'?"
