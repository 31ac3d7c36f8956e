"""The functions of verl's `core_algos`, with verl's argument order.

Each hands its arguments to the implementation of the same algorithm. `epsilon` of estimators whose
formula has none (rloo, opo, gpg, reinforce_plus_plus_baseline) is taken and enters nothing, as there.
"""

from __future__ import annotations

from enum import Enum

import torch
from tensordict import TensorDict
from torch import Tensor

from hone.algorithms import advantages, policy_losses
from hone.algorithms.advantages.gae import gae
from hone.algorithms.advantages.gdpo import gdpo
from hone.algorithms.advantages.gpg import gpg
from hone.algorithms.advantages.grpo import EPS, grpo
from hone.algorithms.advantages.opo import opo
from hone.algorithms.advantages.optimal_token_baseline import EPS as BASELINE_EPS
from hone.algorithms.advantages.optimal_token_baseline import (
    optimal_token_baseline,
    tir_optimal_token_baseline,
)
from hone.algorithms.advantages.passk import grpo_passk
from hone.algorithms.advantages.reinforce_plus_plus import (
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from hone.algorithms.advantages.remax import remax
from hone.algorithms.advantages.rloo import rloo
from hone.algorithms.policy_losses.reinforce import reinforce
from hone.algorithms.policy_losses.vanilla import vanilla
from hone.algorithms.shaping import pf_ppo_rows
from hone.ops.groups import Labels
from hone.plugins import TableView
from hone.protocol import DataProto
from hone.types import Row, Settings

Pair = tuple[Tensor, Tensor]  # advantages and returns, both [B, T]

ADV_ESTIMATOR_REGISTRY = TableView(advantages.TABLE)
POLICY_LOSS_REGISTRY = TableView(policy_losses.TABLE)


class AdvantageEstimator(str, Enum):
    """verl's names of estimators; any name of the table may be written as a plain string."""

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


def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> Pair:
    return gae(token_level_rewards, response_mask, values=values, gamma=gamma, lam=lam)


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    epsilon: float = EPS,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: Settings | None = None,
) -> Pair:
    """The division follows the argument, else the config, else it is on."""
    by_std = norm_adv_by_std_in_grpo
    return grpo(
        token_level_rewards,
        response_mask,
        index,
        config,
        epsilon=epsilon,
        norm_adv_by_std_in_grpo=by_std,
    )


def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    epsilon: float = EPS,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: Settings | None = None,
    **columns: Labels | None,
) -> Pair:
    """The division follows the argument, else the config, else it is on."""
    by_std = norm_adv_by_std_in_grpo
    return grpo_passk(
        token_level_rewards,
        response_mask,
        index,
        config,
        epsilon=epsilon,
        norm_adv_by_std_in_grpo=by_std,
        **columns,
    )


def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    epsilon: float = EPS,
    norm_adv_by_std_in_grpo: bool = True,
    config: Settings | None = None,
    non_tensor_batch: Row | None = None,
    batch: TensorDict | None = None,
    **columns: Labels | None,
) -> Pair:
    """Without a config the rewards themselves are the only part."""
    if config is None:
        config = {"gdpo_reward_keys": ["all"], "gdpo_reward_weights": None}
        columns = {**columns, "reward/all": token_level_rewards}
    return gdpo(
        token_level_rewards,
        response_mask,
        index,
        config,
        epsilon=epsilon,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
        non_tensor_batch=non_tensor_batch,
        **columns,
    )


def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    epsilon: float = EPS,
    config: Settings | None = None,
    **columns: Labels | None,
) -> Pair:
    return rloo(token_level_rewards, response_mask, index, config, **columns)


def compute_opo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    epsilon: float = EPS,
    config: Settings | None = None,
    **columns: Labels | None,
) -> Pair:
    return opo(token_level_rewards, response_mask, index, config, **columns)


def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    epsilon: float = EPS,
    config: Settings | None = None,
    **columns: Labels | None,
) -> Pair:
    return reinforce_plus_plus_baseline(
        token_level_rewards, response_mask, index, config, **columns
    )


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: Settings | None = None,
    index: Labels | None = None,
    **columns: Labels | None,
) -> Pair:
    return reinforce_plus_plus(token_level_rewards, response_mask, index, config, **columns)


def compute_remax_outcome_advantage(
    token_level_rewards: Tensor,
    reward_baselines: Tensor,
    response_mask: Tensor,
    config: Settings | None = None,
    index: Labels | None = None,
    **columns: Labels | None,
) -> Pair:
    return remax(
        token_level_rewards,
        response_mask,
        index,
        config,
        reward_baselines=reward_baselines,
        **columns,
    )


def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    epsilon: float = EPS,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: Settings | None = None,
    **columns: Labels | None,
) -> Pair:
    """`alpha` is taken and replaced by the formula's own, as in verl."""
    return gpg(token_level_rewards, response_mask, index, config, f_norm=f_norm, **columns)


def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = BASELINE_EPS,
    config: Settings | None = None,
    **columns: Labels | None,
) -> Pair:
    return optimal_token_baseline(
        token_level_rewards,
        response_mask,
        index,
        config,
        old_log_probs=old_log_probs,
        sum_pi_squared=sum_pi_squared,
        rollout_is_weights=rollout_is_weights,
        handle_zero_tail=handle_zero_tail,
        epsilon=epsilon,
        **columns,
    )


def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = BASELINE_EPS,
    config: Settings | None = None,
    **columns: Labels | None,
) -> Pair:
    return tir_optimal_token_baseline(
        token_level_rewards,
        response_mask,
        index,
        config,
        old_log_probs=old_log_probs,
        sum_pi_squared=sum_pi_squared,
        rollout_is_weights=rollout_is_weights,
        handle_zero_tail=handle_zero_tail,
        epsilon=epsilon,
        **columns,
    )


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
    """PPO's clipped loss, the share clipped, the approximate KL, and the share of the dual clip."""
    if cliprange is None and (cliprange_low is None or cliprange_high is None):
        raise ValueError("compute_policy_loss needs cliprange, or cliprange_low and cliprange_high")
    config = {
        "clip_ratio": cliprange,
        "clip_ratio_low": cliprange_low,
        "clip_ratio_high": cliprange_high,
        "clip_ratio_c": clip_ratio_c,
    }
    loss, metrics = vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config
    )
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    clipped, kl, clipped_below = (metrics[name] for name in names)
    return loss, clipped, kl, clipped_below


def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Settings | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    return reinforce(
        rollout_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode,
        config,
        rollout_is_weights,
    )


def compute_rewards(
    token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float
) -> Tensor:
    """[B, T] scores − kl_ratio · (log π_old − log π_ref)."""
    return token_level_scores - (old_log_prob - ref_log_prob) * kl_ratio


def compute_pf_ppo_reweight_data(
    data: DataProto, reweight_method: str = "pow", weight_pow: float = 2.0
) -> DataProto:
    """Rows drawn again by their scores, from torch's global random state.

    Entries of meta_info that are lists with one item per row are drawn with them.
    """
    scores = data.batch["token_level_scores"].sum(dim=-1)
    rows = pf_ppo_rows(scores, reweight_method, weight_pow, torch.default_generator)
    drawn = data.select_idxs(rows)
    for key, value in data.meta_info.items():
        if isinstance(value, list) and len(value) == len(data):
            drawn.meta_info[key] = [value[row] for row in rows.tolist()]
    return drawn
