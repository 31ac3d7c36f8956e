"""How many groups of a batch teach nothing, because all their responses have the same score."""

from __future__ import annotations

import logging

from hone.algorithms.advantages.outcome import outcomes
from hone.columns import require
from hone.protocol import DataProto

log = logging.getLogger(__name__)

METRIC = "reward/groups_without_signal"


class GroupSignal:
    """Measures each step, and warns where a whole batch has no signal, once per run of such steps."""

    def __init__(self, *, compares_groups: bool) -> None:
        self.compares_groups = compares_groups
        self._is_silent = False

    def measure(self, batch: DataProto, step: int) -> dict[str, float]:
        """The share of groups with equal scores; nothing where every group has one response."""
        facts = batch.non_tensor_batch
        outcome = outcomes(
            "scores",
            require(batch, "token_level_scores"),
            require(batch, "response_mask"),
            facts["uid"],
            facts.get("trajectory_id"),
        )
        groups, scores = outcome.groups, outcome.scores
        several = groups.sizes > 1
        if not several.any():
            return {}
        equal = (groups.max(scores) == groups.min(scores))[several]
        self._tell(bool(equal.all()), len(equal), step)
        return {METRIC: equal.double().mean().item()}

    def _tell(self, is_silent: bool, groups: int, step: int) -> None:
        if is_silent and not self._is_silent and self.compares_groups:
            log.warning(
                "step %d: in each of the %d groups all responses have the same score, so the step "
                "teaches nothing; use prompts that are neither too easy nor too hard, a score with "
                "more steps, more responses per prompt (actor_rollout_ref.rollout.n), or "
                "algorithm.filter_groups.enable=true",
                step,
                groups,
            )
        self._is_silent = is_silent
