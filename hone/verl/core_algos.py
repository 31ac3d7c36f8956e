"""The functions of verl's `core_algos`, with verl's argument order."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor

from hone.algorithms import advantages, policy_losses
from hone.algorithms.advantages.estimator import Estimate, grpo
from hone.algorithms.advantages.group_baseline import gdpo, gpg, grpo_passk, opo
from hone.algorithms.advantages.optimal_token_baseline import (
    optimal_token_baseline,
    tir_optimal_token_baseline,
)
from hone.algorithms.advantages.returns import (
    gae,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
)
from hone.algorithms.advantages.rloo import rloo
from hone.algorithms.policy_losses.policy_loss import agg_loss, vanilla
from hone.algorithms.policy_losses.ratio import reinforce
from hone.algorithms.row_selection import pf_ppo_rows
from hone.plugins import TableView
from hone.protocol import DataProto
from hone.types import Settings

ADV_ESTIMATOR_REGISTRY = TableView(advantages.TABLE)
POLICY_LOSS_REGISTRY = TableView(policy_losses.TABLE)


class AdvantageEstimator(str, Enum):
    """verl's names of estimators; a plain string can be used instead of a member."""

    GAE = "gae"
    GRPO = "grpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    OPO = "opo"
    GRPO_PASSK = "grpo_passk"
    GPG = "gpg"
    RLOO_VECTORIZED = "rloo_vectorized"
    GRPO_VECTORIZED = "grpo_vectorized"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"
    GDPO = "gdpo"


compute_gae_advantage_return = gae
compute_grpo_outcome_advantage = grpo
compute_grpo_passk_outcome_advantage = grpo_passk
compute_rloo_outcome_advantage = rloo
compute_opo_outcome_advantage = opo
compute_reinforce_plus_plus_baseline_outcome_advantage = reinforce_plus_plus_baseline
compute_reinforce_plus_plus_outcome_advantage = reinforce_plus_plus
compute_remax_outcome_advantage = remax
compute_gpg_outcome_advantage = gpg
compute_optimal_token_baseline_advantage = optimal_token_baseline
compute_multi_turn_optimal_token_baseline_advantage = tir_optimal_token_baseline


def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor, *args: Any, config: Settings | None = None, **kwargs: Any
) -> Estimate:
    """Returns the estimate of GDPO; without a config, `token_level_rewards` is the only reward part."""
    if config is None and len(args) < 5:  # verl's sixth argument is the config
        config = {"gdpo_reward_keys": ["all"], "gdpo_reward_weights": None}
        kwargs["reward/all"] = token_level_rewards
    if config is not None:
        kwargs["config"] = config
    return gdpo(token_level_rewards, *args, **kwargs)


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns PPO's clipped loss, the clip fraction, the approximate KL and the dual-clip fraction."""
    if cliprange is None and (cliprange_low is None or cliprange_high is None):
        raise ValueError("compute_policy_loss needs cliprange, or cliprange_low and cliprange_high")
    config = {
        "clip_ratio": cliprange,
        "clip_ratio_low": cliprange_low,
        "clip_ratio_high": cliprange_high,
        "clip_ratio_c": clip_ratio_c,
    }
    arguments = (old_log_prob, log_prob, advantages, response_mask)
    loss, metrics = vanilla(*arguments, loss_agg_mode, config)
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    clip_fraction, kl, dual_clip_fraction = (metrics[name] for name in names)
    return loss, clip_fraction, kl, dual_clip_fraction


def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Settings | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    arguments = (rollout_log_prob, log_prob, advantages, response_mask)
    return reinforce(*arguments, loss_agg_mode, config, rollout_is_weights)


def compute_entropy_loss(
    logits: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Returns this micro-batch's share of the mean entropy of softmax(logits), logits [B, T, V]."""
    if logits.dim() != 3 or logits.shape[:2] != response_mask.shape:
        raise ValueError(
            f"compute_entropy_loss takes logits [B, T, V] and a mask [B, T]; got "
            f"{list(logits.shape)} and {list(response_mask.shape)}. Aggregate entropies with agg_loss"
        )
    probabilities = torch.softmax(logits, dim=-1)
    finite_logits = torch.where(probabilities > 0, logits, 0.0)  # a logit of -inf contributes 0
    entropy = torch.logsumexp(logits, dim=-1) - (probabilities * finite_logits).sum(dim=-1)
    return agg_loss(entropy, response_mask, loss_agg_mode, loss_scale_factor=loss_scale_factor)


def compute_rewards(
    token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float
) -> Tensor:
    """Returns [B, T] scores − kl_ratio · (log π_old − log π_ref)."""
    return token_level_scores - (old_log_prob - ref_log_prob) * kl_ratio


def compute_pf_ppo_reweight_data(
    data: DataProto, reweight_method: str = "pow", weight_pow: float = 2.0
) -> DataProto:
    """Resamples the rows by score, with torch's global generator.

    A list in `meta_info` that has one item per row is resampled with the rows.
    """
    scores = data.batch["token_level_scores"].sum(dim=-1)
    rows = pf_ppo_rows(scores, reweight_method, weight_pow, torch.default_generator)
    resampled = data.select_idxs(rows)
    for key, value in data.meta_info.items():
        if isinstance(value, list) and len(value) == len(data):
            resampled.meta_info[key] = [value[row] for row in rows.tolist()]
    return resampled
