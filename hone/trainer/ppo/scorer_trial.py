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
"""Data sources that are tried at most."""
ROWS = 3
"""Rows of a source that are tried at most: the first, one in the middle and the last."""


def try_scorers(
    manager: AbstractRewardManager, dataset: Dataset, config: PPOTrainerConfig
) -> Iterator[Verdict]:
    """One verdict per data source whose rows a rule of ours calls a scorer for."""
    if not isinstance(manager, RuleRewardManager) or not isinstance(dataset, RLHFDataset):
        return
    rows = _Rows(dataset, manager, config)
    for positions in rows.by_source():
        chosen = dict.fromkeys((positions[0], positions[len(positions) // 2], positions[-1]))
        yield try_scorer(manager, [rows.trial(position) for position in chosen])
    if rows.without_truth:
        yield rows.verdict_on_truths()


class _Rows:
    def __init__(
        self, dataset: RLHFDataset, manager: RuleRewardManager, config: PPOTrainerConfig
    ) -> None:
        self.dataset, self.manager, self.config = dataset, manager, config
        self.without_truth: list[int] = []
        self.count = 0

    def by_source(self) -> list[list[int]]:
        """Positions of rows that single-turn loops hand to the rule, for each data source."""
        key, default = (
            self.manager.reward_fn_key,
            self.config.actor_rollout_ref.rollout.default_loop,
        )
        kept = set(self.dataset.positions)
        found: dict[str, list[int]] = {}
        columns = (key, "reward_model", "agent_name")
        for position, row in enumerate(self.dataset.store.scan(columns)):
            reward_model = row.get("reward_model") or {}
            played = (row.get("agent_name") or default) == SINGLE_TURN_AGENT
            source, truth = str(row.get(key)), reward_model.get("ground_truth")
            ruled = reward_model.get("style") != "model" and self.manager.knows(source)
            if position not in kept or not played or not ruled:
                continue
            self.count += 1
            if self.manager.lacks_ground_truth(source, truth):
                self.without_truth.append(position)
            found.setdefault(source, []).append(position)
        return list(found.values())[:SOURCES]

    def trial(self, position: int) -> TrialRow:
        store = self.dataset.store
        keys = self.manager.reward_fn_key, self.config.data.prompt_key
        return TrialRow.of(store[position], store.where(position), *keys)

    def verdict_on_truths(self) -> Verdict:
        """Rows that their rule can compare with nothing."""
        first = self.dataset.store.where(self.without_truth[0])
        told = (
            f"{len(self.without_truth):,} of {self.count:,} rows have no reward_model.ground_truth to "
            f"compare with (the first: {first})"
        )
        if self.manager.policy.on_failure == "raise":
            return Verdict(problem=f"{told}; write them, or leave these rows out")
        return Verdict(warning=f"{told}: each scores {self.manager.policy.failure_score:g}")
