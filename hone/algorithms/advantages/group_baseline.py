"""Estimators with other group baselines or scales: OPO, GPG, Pass@k, MaxRL, Lite-PPO, GDPO.

R is a trajectory's score, len the number of its policy tokens; mean_g and std_g are over its group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hone.algorithms.advantages.estimator import (
    CALL_ONLY,
    EPS,
    GROUP_ARGUMENTS,
    Estimate,
    Estimator,
    EstimatorFunction,
    OutcomeEstimator,
    Outcomes,
    Trajectories,
    group_relative_scores,
    row_sums,
)
from hone.columns import REWARD_PREFIX
from hone.types import Columns


@dataclass(frozen=True)
class OPO(OutcomeEstimator):
    """A = R − Σ len·R / Σ len over the group (2505.23585); a group of one keeps its raw score."""

    group_use = "compared"

    def advantages(self, outcome: Outcomes) -> Tensor:
        groups = outcome.groups
        baseline = groups.mean(outcome.scores, outcome.lengths)[groups.ids]
        return outcome.scores - baseline.masked_fill(groups.is_singleton, 0.0)


@dataclass(frozen=True)
class GPG(OutcomeEstimator):
    """A = α·(R − mean_g)/f_norm (2504.02546), α = trajectories / trajectories whose score is not 0."""

    f_norm: float = 1.0

    group_use = "compared"

    def __post_init__(self) -> None:
        if self.f_norm == 0:
            raise ValueError("gpg: f_norm divides the advantages and cannot be 0")

    def advantages(self, outcome: Outcomes) -> Tensor:
        scores = outcome.scores
        alpha = len(scores) / scores.count_nonzero().double().clamp(min=1)
        return alpha * (scores - outcome.baseline()) / self.f_norm


@dataclass(frozen=True)
class PassK(OutcomeEstimator):
    """Pass@k: A = (R_best − R_second) / (std_g + ε) for the best response, 0 for the others.

    A group of one gets 0; a batch of only such groups is an error.
    """

    norm_adv_by_std_in_grpo: bool
    epsilon: float = EPS

    group_use = "required"

    def advantages(self, outcome: Outcomes) -> Tensor:
        groups, scores = outcome.groups, outcome.scores
        has_second = groups.sizes > 1  # per group
        if groups.count and not has_second.any():
            raise ValueError(
                "grpo_passk compares the best response of a prompt with the second best, but no "
                "prompt of this batch has two responses; set actor_rollout_ref.rollout.n to 2 or "
                "more"
            )
        # Sorted by group and then by score, so the first two entries of a group are its best responses.
        order = torch.argsort(scores, descending=True, stable=True)
        order = order[torch.argsort(groups.ids[order], stable=True)]
        first_entries = (groups.sizes.cumsum(0) - groups.sizes).long()[has_second]
        best, second = order[first_entries], order[first_entries + 1]
        margin = scores[best] - scores[second]
        if self.norm_adv_by_std_in_grpo:
            divisor = groups.std(scores)[has_second] + self.epsilon
            margin = torch.where(divisor > 0, margin / divisor, 0.0)  # 0/0 if epsilon is 0
        return torch.zeros_like(scores).index_copy_(0, best, margin)


@dataclass(frozen=True)
class MaxRL(OutcomeEstimator):
    """A = (R − mean_g)/(mean_g + ε) (2602.02710): rare successes count more; a group of one gets 0."""

    group_use = "required"

    def advantages(self, outcome: Outcomes) -> Tensor:
        groups, scores = outcome.groups, outcome.scores
        if (scores < 0).any():
            raise ValueError(
                f"maxrl divides by the mean score of a group, so scores must be 0 or more; got "
                f"{float(scores.min()):g}. Use rewards such as 0/1 and put the KL in the loss "
                "(algorithm.use_kl_in_reward=false, actor_rollout_ref.actor.use_kl_loss=true)"
            )
        mean = groups.mean(scores)[groups.ids]
        return (scores - mean) / (mean + EPS)


@dataclass(frozen=True)
class LitePPO(OutcomeEstimator):
    """A = (R − mean_g)/(std_batch + ε) (2508.08221), std unbiased; a group of one gets 0."""

    group_use = "required"

    def advantages(self, outcome: Outcomes) -> Tensor:
        groups, scores = outcome.groups, outcome.scores
        std = torch.std(scores) if len(scores) > 1 else scores.new_zeros(())
        return (scores - groups.mean(scores)[groups.ids]) / (std + EPS)


@dataclass(frozen=True)
class GDPO(Estimator):
    """A = whiten(Σ_k w_k·grpo(R_k)) (2601.05242). R_k is a reward part, [B, T] or [B], and w_k its weight.

    A reward part is a column `reward/<key>`, or `non_tensor_batch[<key>]` as in verl.
    """

    gdpo_reward_keys: tuple[str, ...] | None
    gdpo_reward_weights: tuple[float, ...] | None
    norm_adv_by_std_in_grpo: bool = field(default=True, metadata=CALL_ONLY)
    epsilon: float = EPS

    group_use = "compared"

    def __post_init__(self) -> None:
        keys, weights = self.gdpo_reward_keys, self.gdpo_reward_weights
        if not keys:
            raise ValueError(
                "algorithm.adv_estimator=gdpo needs algorithm.gdpo_reward_keys, the parts to "
                "normalise; set it, for example algorithm.gdpo_reward_keys=[acc,format]"
            )
        if weights and len(weights) != len(keys):
            raise ValueError(
                f"algorithm.gdpo_reward_weights has {len(weights)} numbers for {len(keys)} "
                "algorithm.gdpo_reward_keys; give one each, or null"
            )

    @property
    def requires(self) -> tuple[str, ...]:
        keys = self.gdpo_reward_keys or ()
        return tuple(REWARD_PREFIX + str(key).removeprefix(REWARD_PREFIX) for key in keys)

    def __call__(self, batch: Trajectories) -> Estimate:
        outcome = batch.outcomes("gdpo", batch.rewards)
        total = torch.zeros(len(outcome.groups.ids), dtype=torch.float64, device=batch.mask.device)
        weights = self.gdpo_reward_weights or [1.0] * len(self.requires)
        for name, weight in zip(self.requires, weights, strict=True):
            part = _reward_part(name, batch.columns).to(total.device)
            per_row = row_sums(part, outcome.mask) if part.dim() == 2 else part.double()
            total += weight * group_relative_scores(
                outcome.groups,
                outcome.sum_rows(per_row),
                self.norm_adv_by_std_in_grpo,
                self.epsilon,
            )
        advantages = outcome.broadcast(outcome.whiten(total))
        return advantages, advantages


def _reward_part(name: str, columns: Columns) -> Tensor:
    """Returns the column `reward/<key>`, else the column `<key>` of `non_tensor_batch`."""
    if name in columns:
        return torch.as_tensor(columns[name])
    key = name.removeprefix(REWARD_PREFIX)
    object_columns = columns.get("non_tensor_batch") or {}
    if key not in object_columns:
        available = [*(part for part in columns if part.startswith(REWARD_PREFIX)), *object_columns]
        raise ValueError(
            f"gdpo: the batch has no reward part {name!r}; it has {', '.join(available) or 'none'}. "
            f"A score function adds it by returning a dict with {key!r}"
        )
    try:
        values = torch.tensor([float(value) for value in object_columns[key]], dtype=torch.float64)
    except (TypeError, ValueError):
        values = torch.tensor([torch.nan])
    if not values.isfinite().all():
        raise ValueError(f"gdpo: column {key!r} must hold a finite number in every row")
    return values


opo = EstimatorFunction("opo", OPO, f"{GROUP_ARGUMENTS} epsilon config")
gpg = EstimatorFunction("gpg", GPG, f"{GROUP_ARGUMENTS} epsilon f_norm alpha config")
grpo_passk = EstimatorFunction(
    "grpo_passk", PassK, f"{GROUP_ARGUMENTS} epsilon norm_adv_by_std_in_grpo config"
)
maxrl = EstimatorFunction("maxrl", MaxRL)
lite_ppo = EstimatorFunction("lite_ppo", LitePPO)
gdpo = EstimatorFunction(
    "gdpo", GDPO, f"{GROUP_ARGUMENTS} epsilon norm_adv_by_std_in_grpo config non_tensor_batch batch"
)
