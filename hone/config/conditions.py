"""Keys that depend on each other: the rows of `checks.txt`, read against a tree.

A row says which values cannot stand beside each other, or which keys have no effect. What must be counted is
checked in `checks.py`; what depends on the estimator in `hone/trainer/ppo/plan.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hone.config.block import Value
from hone.config.convert import show_value
from hone.config.keys import get, leaves
from hone.config.schema import PPOTrainerConfig
from hone.config.states import is_one_of, read_table, scalars

_TERM = re.compile(r"([\w.]+)(!=|<=|=|>)(.+)")
_VALUE = re.compile(r"\{([\w.]+)\}")
_BELONGS = re.compile(r"([a-z_]+): ")


def problems_of(tree: str, config: Value) -> Iterator[str]:
    """One sentence per row whose condition holds."""
    for condition, sentence in _rows("problems", tree):
        if holds(condition, config):
            yield _filled(sentence, config)


def find_idle(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    """Keys or blocks without effect beside the others, and why.

    A docstring that begins with a name (`clip_cov: …`) says to what choice a key belongs.
    """
    for condition, keys, sentence in _rows("idle", "ppo_trainer"):
        if holds(condition, config):
            why = _filled(sentence, config) or f"no effect while {condition}"
            yield from ((key, why) for key in keys.split())
    names = _chosen(config)
    for key, leaf in leaves(PPOTrainerConfig).items():
        belongs = _BELONGS.match(leaf.doc)
        if belongs and belongs[1] not in names:
            yield key, f"no effect without {belongs[1]}"


def holds(condition: str, config: Value) -> bool:
    """Whether every term of a condition is true of a tree."""
    return all(_term_holds(term, config) for term in condition.split(" and "))


def _term_holds(term: str, config: Value) -> bool:
    match = _TERM.fullmatch(term)
    assert match is not None, term
    value, sign, words = get(config, match[1]), match[2], scalars(match[3])
    if sign in ("<=", ">"):
        return value is not None and (value > words[0]) == (sign == ">")
    return is_one_of(value, words) == (sign == "=")


def _filled(sentence: str, config: Value) -> str:
    return _VALUE.sub(lambda match: show_value(get(config, match[1])), sentence)


def _rows(section: str, tree: str) -> Iterator[list[str]]:
    """The rows of a tree, without its name."""
    for first, *cells in read_table("checks.txt")[section]:
        owner, _, condition = first.rpartition(":")
        if (owner or "ppo_trainer") == tree:
            yield [condition, *cells]


def _chosen(config: PPOTrainerConfig) -> set[str]:
    """Names that this run has chosen."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    bypass = {"bypass"} if algorithm.rollout_correction.bypass_mode else set()
    return bypass | {
        actor.policy_loss.loss_mode,
        algorithm.adv_estimator,
        algorithm.kl_ctrl.type,
        algorithm.pf_ppo.reweight_method,
        config.curriculum_learning.fn_name,
        config.reward_manager.name,
    }
