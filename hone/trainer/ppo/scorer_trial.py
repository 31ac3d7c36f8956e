"""The scorer of a run called on rows of its data before a model loads."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config import PPOTrainerConfig
from hone.data.dataset import SINGLE_TURN_AGENT, RLHFDataset
from hone.data.loader import Dataset
from hone.rewards.managers.abstract import AbstractRewardManager
from hone.rewards.managers.rule import RuleRewardManager
from hone.rewards.trial import TrialRow, Verdict, try_scorer

SOURCES = 16
"""Data sources that are tried at most, each on its first, middle and last row."""


def try_scorers(
    manager: AbstractRewardManager, dataset: Dataset, config: PPOTrainerConfig
) -> Iterator[Verdict]:
    """One verdict per data source whose rows are scored by a function, and one on ground truths."""
    if not isinstance(manager, RuleRewardManager) or not isinstance(dataset, RLHFDataset):
        return
    key, default = manager.reward_fn_key, config.actor_rollout_ref.rollout.default_loop
    used, store = set(dataset.positions), dataset.store
    by_source: dict[str, list[int]] = {}
    without_truth: list[int] = []
    for position, row in enumerate(store.scan((key, "reward_model", "agent_name"))):
        reward_model = row.get("reward_model") or {}
        single_turn = (row.get("agent_name") or default) == SINGLE_TURN_AGENT
        source, truth = str(row.get(key)), reward_model.get("ground_truth")
        by_rule = reward_model.get("style") != "model" and manager.knows(source)
        if position in used and single_turn and by_rule:
            by_source.setdefault(source, []).append(position)
            if manager.lacks_ground_truth(source, truth):
                without_truth.append(position)
    for positions in list(by_source.values())[:SOURCES]:
        tried = dict.fromkeys((positions[0], positions[len(positions) // 2], positions[-1]))
        keys = key, config.data.prompt_key
        yield try_scorer(manager, [TrialRow.of(store[p], store.where(p), *keys) for p in tried])
    if without_truth:
        count = sum(map(len, by_source.values()))
        problem = (
            f"{len(without_truth):,} of {count:,} rows have no reward_model.ground_truth to compare "
            f"with (the first: {store.where(without_truth[0])})"
        )
        if manager.policy.on_failure == "raise":
            yield Verdict(problem=f"{problem}; write them, or leave these rows out")
        else:
            yield Verdict(warning=f"{problem}: each scores {manager.policy.failure_score:g}")
