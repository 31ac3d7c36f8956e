"""The algorithm: advantage estimator, KL, rollout correction, group filters.

Formulas live in `hone.algorithms`; `docs/algorithms.md` has one table of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hone.config.block import Block, block
from hone.config.correction_presets import CorrectionPresets
from hone.config.ranges import Count, CountOrZero, NotNegative, Positive, Share
from hone.types import Settings


@dataclass(frozen=True)
class KLControlConfig(Block):
    """Weight of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed keeps `kl_coef`; adaptive steers towards `target_kl`."""
    kl_coef: NotNegative = 0.001
    """The weight, or where the adaptive one starts."""
    horizon: Count = 10000
    """adaptive: sequences over which the weight reacts."""
    target_kl: Positive = 0.1
    """adaptive: the KL to hold."""


@dataclass(frozen=True)
class PFPPOConfig(Block):
    """PF-PPO: resample the batch by reward."""

    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    """How a score becomes a weight."""
    weight_pow: float = 2.0
    """pow: the exponent."""


@dataclass(frozen=True)
class RolloutCorrectionConfig(CorrectionPresets, Block):
    """Correction for rollout log-probs that differ from the trainer's."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Importance weights by token or sequence; null has none."""
    rollout_is_threshold: float | str = 2.0
    """Weights are cut at this value; `lo_hi` zeroes weights outside the band (IcePop)."""
    rollout_rs: str | tuple[str, ...] | None = None
    """Rejection options, comma separated: token_k1…k3, seq_sum_k1…, seq_mean_k1…, seq_max_k2|k3."""
    rollout_rs_threshold: float | str | None = None
    """Bounds of the rejection options: one number, or `lo_hi` for k1, comma separated."""
    bypass_mode: bool = False
    """Use rollout log-probs as the old ones; no recomputation."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """bypass: the loss."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their batch mean."""


@dataclass(frozen=True)
class FilterGroupsConfig(Block):
    """DAPO's dynamic sampling: drop groups without signal and generate more."""

    enable: bool = False
    """Filter groups."""
    metric: str | None = "reward"
    """What must vary within a group: acc, score, reward, seq_reward, seq_final_reward, an extra."""
    max_num_gen_batches: CountOrZero = 20
    """Generation rounds per step before the run stops; 0 is no limit (verl's default)."""
    max_empty_gen_batches: Count = 10
    """Successive rounds that keep no group before the run stops, also without a limit above."""
    max_inflight_gen_batches: Count = 2
    """Generation rounds under way at the same time; 1 starts a round when the last one is judged."""
    order: Literal["submission", "finish"] = "submission"
    """Which groups fill the batch: the first that were asked for, or the first that ended (which makes a
    run depend on timing)."""


@dataclass(frozen=True)
class AlgorithmConfig(Block):
    """Advantages, KL in the reward, correction, filters."""

    gamma: Share = 1.0
    """Discount per token."""
    lam: Share = 1.0
    """GAE's lambda."""
    adv_estimator: str = "gae"
    """Name of the estimator, or `pkg.mod:function` for your own."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide group advantages by the group's deviation; false is Dr.GRPO."""
    adv_norm: bool = False
    """Whiten advantages over all policy tokens of the batch, whatever the estimator."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference policy from each token's reward."""
    kl_penalty: str = "kl"
    """KL estimator in the reward: kl|k1, abs, mse|k2, low_var_kl|k3."""
    kl_ctrl: KLControlConfig = block(KLControlConfig)
    use_pf_ppo: bool = False
    """Resample the batch by reward."""
    pf_ppo: PFPPOConfig = block(PFPPOConfig)
    rollout_correction: RolloutCorrectionConfig = block(RolloutCorrectionConfig)
    filter_groups: FilterGroupsConfig = block(FilterGroupsConfig)
    gdpo_reward_keys: tuple[str, ...] | None = None
    """gdpo: reward parts normalised one by one."""
    gdpo_reward_weights: tuple[float, ...] | None = None
    """gdpo: weight of each part; null is 1 each."""


@dataclass(frozen=True)
class CurriculumFilterConfig(Block):
    """PURE's filter of groups that are too easy or too hard."""

    enable: bool = False
    """Filter groups by their mean rule score."""
    fn_name: Literal["remove_extreme", "interquartile"] = "remove_extreme"
    """remove_extreme keeps 0 < mean < 1; interquartile keeps the middle of the batch."""
    fn_params: Settings = field(
        default_factory=lambda: {"lower_percentile_bound": 25, "upper_percentile_bound": 75}
    )
    """interquartile: the percentiles."""
